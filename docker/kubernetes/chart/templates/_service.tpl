{{- define "canary.service" -}}
- name: kv-canary
  image: {{ include "canary.image" . | quote }}
  imagePullPolicy: {{ .Values.canary.image.pullPolicy }}
  args: [--host, "0.0.0.0", --port, "9464"]
  env:
    - {name: KV_CANARY_ENDPOINT, value: "ipc:///run/canary/socket/service.sock"}
    - {name: KV_CANARY_TOKENS_FILE, value: /etc/kv-canary/tokens.toml}
    # Sweeps and what was acknowledged outlive a restart of this container.
    - {name: KV_CANARY_STATE_FILE, value: /var/lib/kv-canary/state.json}
    {{- if .Values.canary.drill }}
    - {name: KV_CANARY_DRILL_ENABLED, value: "true"}
    {{- end }}
    {{- with .Values.canary.serviceEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: kv-canary, containerPort: 9464}
  # These paths need no token: they only answer yes or no. There is no readiness probe on purpose: a pod is ready when
  # all its containers are, and an observer that struggles must not take its engine out of service.
  startupProbe:
    httpGet: {path: /readyz, port: kv-canary}
    periodSeconds: 2
    failureThreshold: 30
  livenessProbe:
    httpGet: {path: /healthz, port: kv-canary}
    periodSeconds: 10
    timeoutSeconds: 5
  securityContext:
    {{- include "canary.hardened" . | nindent 4 }}
  resources:
    {{- toYaml .Values.canary.resources | nindent 4 }}
  volumeMounts:
    - {name: socket, mountPath: /run/canary}
    - {name: state, mountPath: /var/lib/kv-canary}
    - {name: scratch, mountPath: /tmp, subPath: service}
    - {name: tokens, mountPath: /etc/kv-canary, readOnly: true}
{{- end -}}
