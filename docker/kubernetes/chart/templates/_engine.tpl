{{- define "canary.engine" -}}
- name: engine
  image: {{ .Values.engine.image | quote }}
  imagePullPolicy: {{ .Values.engine.pullPolicy }}
  command: {{- toYaml .Values.engine.command | nindent 4 }}
  args:
    - {{ .Values.engine.model | quote }}
    - --port
    - "8000"
    {{- with .Values.engine.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - {name: KV_CANARY_MODE, value: {{ .Values.canary.mode }}}
    - {name: KV_CANARY_ENDPOINT, value: "ipc:///run/canary/socket/service.sock"}
    - name: KV_CANARY_INSTANCE
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- if .Values.canary.drill }}
    - {name: KV_CANARY_DRILL_ENABLED, value: "true"}
    {{- end }}
    {{- if .Values.canary.install }}
    - {name: PYTHONPATH, value: /opt/canary-obs}
    {{- end }}
    # A user without a home: what engines, compilers and model loaders keep is on the one volume that may grow.
    - {name: HOME, value: /cache}
    - {name: USER, value: engine}
    - {name: HF_HOME, value: /cache/huggingface}
    - {name: VLLM_CACHE_ROOT, value: /cache/vllm}
    - {name: TRITON_CACHE_DIR, value: /cache/triton}
    - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
    - {name: NUMBA_CACHE_DIR, value: /cache/numba}
    {{- with .Values.engine.huggingFaceSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
    {{- end }}
    {{- with concat .Values.engine.env .Values.canary.engineEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: http, containerPort: 8000}
  startupProbe:
    httpGet: {path: {{ .Values.engine.healthPath }}, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ div (add .Values.engine.startSeconds 9) 10 }}
  readinessProbe:
    httpGet: {path: {{ .Values.engine.healthPath }}, port: http}
    periodSeconds: 5
    timeoutSeconds: 5
  livenessProbe:
    httpGet: {path: {{ .Values.engine.healthPath }}, port: http}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 6
  securityContext:
    {{- include "canary.hardened" . | nindent 4 }}
  resources:
    {{- with .Values.engine.resources.requests }}
    requests: {{- toYaml . | nindent 6 }}
    {{- end }}
    limits:
      {{- with .Values.engine.resources.limits }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- if .Values.engine.gpus }}
      {{ .Values.engine.gpuResource }}: {{ .Values.engine.gpus }}
      {{- end }}
  volumeMounts:
    - {name: socket, mountPath: /run/canary}
    - {name: scratch, mountPath: /tmp, subPath: engine}
    - {name: shared-memory, mountPath: /dev/shm}
    - {name: cache, mountPath: /cache}
    {{- if .Values.canary.install }}
    - {name: plugin, mountPath: /opt/canary-obs, readOnly: true}
    {{- end }}
{{- end -}}
