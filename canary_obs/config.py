"""Settings, read once from a TOML file, KV_CANARY_* variables and flags (the later wins), and validated."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from canary_obs.binding import HIDDEN, check_bind
from canary_obs.config_values import PatrolBudget, parse_patrol_budget, parse_perturb, parse_ranks
from canary_obs.errors import ConfigurationError, UnknownSetting
from canary_obs.vocabulary import HealPolicy, Mode

PREFIX = "KV_CANARY_"
FILE_VARIABLE = PREFIX + "CONFIG"
DEFAULT_PORT = 9464
IN_PROCESS = "inproc"
RUNBOOK_BASE = "https://github.com/canary-obs/canary-obs/blob/main/alerts/runbooks"

Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Kept = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]  # a year; an infinite one would switch its check off
Fraction = Annotated[float, Meta(ge=0, le=1)]
Address = Annotated[
    str, Meta(pattern=r"^(https?://\S+)?$", description="an http:// or https:// address, or nothing")
]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


def default_endpoint() -> str:
    """A per-user Unix socket: $XDG_RUNTIME_DIR/canary_obs/service.sock, else under /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "canary_obs" if runtime else Path(f"/tmp/canary_obs-{os.getuid()}")
    return f"ipc://{folder}/service.sock"


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine process. The defaults are safe for production."""

    mode: Mode = Mode.LOG
    real_data: Literal["none", "partial", "all"] = "all"  # bytes a fingerprint covers
    prefix_data: bool | None = None  # re-hash every prefix at every tail: exact, slow; None = in mode raise
    reuse_data: bool = True  # check a slot's bytes before the forward overwrites it
    verify_on_hit: bool = False  # check the bytes of prefix hits before the forward that reads them first
    state_interval: Kept | None = None  # of so many decodes one checks states; None = 16, in mode raise 1
    layer_data: bool = False  # compare one layer of the new slots, in rotation, with before the forward
    sweep_interval: Count = 0  # forward steps between sweeps; 0 = off
    idle_sweep: bool = True
    idle_sweep_seconds: Seconds = 10.0  # after the last sweep, in an idle engine
    busy_sweep: bool = True  # between steps, once the last sweep is half of sweep_max_age_seconds old
    swa_divergence_interval: Count = 1000  # forward steps between reports; 0 = only at detach
    unlocked_only: bool = False  # interval and idle sweeps leave out slots that running requests use
    swa_resident_only: bool = False  # ... and tokens without a slot in the sliding-window group
    sweep_budget_ms: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # per engine step
    # "1%", "0.01", "15GB/s", "off". A share is of time on a CPU, of bandwidth on a GPU (stepping: a tenth).
    patrol_budget: str = "1%"
    backend: Literal["auto", "torch", "numba", "triton"] = "auto"
    endpoint: str = msgspec.field(default_factory=default_endpoint)  # where the service listens
    engine_secret_key_file: str = ""  # for tcp:// endpoints: this engine's own key (canary-obs keys FOLDER)
    service_public_key_file: str = ""  # ... and the key of the only service it connects to
    serve: Literal["off", "auto"] = "off"  # auto = rank 0 of a vLLM engine starts the service
    engine: Label = "unknown"  # label; "unknown" = the adapter's name
    instance: Label = "default"
    rank: Annotated[int, Meta(ge=0, le=65_535)] = 0
    expected_ranks: str = ""  # "0-7" or "0,1,4": ranks that report to the same service; vLLM fills it in
    reveal_tokens: bool = False
    untried_engine: Literal["attach", "refuse"] = "attach"  # an engine newer than the versions tested
    write_history: bool | None = None  # each slot's last write step: 8 B per slot; None = on a CPU only
    lane_rows: Annotated[int, Meta(ge=2, le=4096)] = 32  # violation rows kept per (group, phase, reason)
    pipeline_rows: Annotated[int, Meta(ge=2, le=1024)] = 16
    snapshot_seconds: Seconds = 0.25
    coverage_target: Fraction = 0.99  # protected bytes / pool bytes below this is `degraded`
    check_coverage_target: Fraction | None = None  # of the last seconds' slot checks; None = coverage_target
    sweep_max_age_seconds: Seconds = 3600.0
    patrol_max_cycle_seconds: Seconds = 3600.0
    copy_records: bool = (
        True  # keep what is known of offloaded KV in files next to it, also for the next start
    )
    copy_records_key_file: str = ""  # ... sealed with this key, where others may write there; 32 to 64 bytes
    heal: HealPolicy = HealPolicy.OFF  # what is done about damage; dry_run says what protect would do
    heal_actions_per_minute: Kept = 30  # beyond it healing is a dry run, until an operator chooses anew
    heal_pool_share: Fraction = 0.25  # ... and of the pool's blocks within a minute, and in quarantine
    transfer_records: bool = False  # send records with KV between SGLang's servers: on both or on neither
    drill_enabled: bool = False  # reserves a slot at attach, for POST /canary/drill
    perturb: str = ""  # "real_kv_used=0.05,req_to_token=0.01": probability per step
    perturb_enabled: bool = False  # a safeguard: perturb is refused without it
    perturb_seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    perturb_warmup: Count = 20  # steps before the first injection
    perturb_limit: Count = 0  # injections in total; 0 = no limit
    perturb_group: str = ""  # where faults are injected; may be left out where the engine has one group

    @property
    def longest_between_checks_seconds(self) -> float:
        """Damage that stays is found again within this time, whichever check is meant to find it."""
        return max(self.patrol_max_cycle_seconds, self.sweep_max_age_seconds)

    @property
    def parsed_patrol_budget(self) -> PatrolBudget:
        """`patrol_budget`, read."""
        return parse_patrol_budget(self.patrol_budget)

    @property
    def states_checked_every(self) -> int:
        """`state_interval`, which in mode `raise` is 1 unless it is set."""
        if self.state_interval is None:
            return 1 if self.mode is Mode.RAISE else 16
        return self.state_interval

    @property
    def checks_prefix_data(self) -> bool:
        """Whether the bytes of whole prefixes are compared at every tail."""
        return self.mode is Mode.RAISE if self.prefix_data is None else self.prefix_data


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the service process."""

    endpoint: str = msgspec.field(default_factory=default_endpoint)
    service_secret_key_file: str = ""  # for tcp:// endpoints: the service's own key (canary-obs keys FOLDER)
    engine_public_keys_file: str = ""  # ... and the keys of the engines that may connect, one per line
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = DEFAULT_PORT
    token: str = ""  # bearer token with the scopes read and operate; no token at all = open, loopback only
    tokens_file: str = ""  # TOML: further tokens by name, each with its scopes
    session_seconds: Annotated[float, Meta(ge=60, le=604_800)] = 43_200.0  # of a browser, from its sign-in on
    orders_per_minute: Kept = 60  # per token, as burst and as rate; reading is not limited
    drill_enabled: bool = False  # offers POST /canary/drill to tokens with the scope inject
    events_heartbeat_seconds: Seconds = 15.0  # between heartbeats on a stream of /canary/events
    log_file: str = ""  # violations and audit events, a line each; empty = standard error
    log_format: Literal["auto", "json", "text"] = "auto"  # auto = text on a terminal, otherwise JSON lines
    state_file: str = ""  # operators' sweeps, to go on with after a restart of the service; empty = not kept
    violations_kept: Kept = 10_000
    incidents_kept: Kept = 256
    incident_quiet_seconds: Seconds = 60.0  # an incident is closed after this long without a new violation
    # Bounded, as a dead engine is `ok` for so long.
    snapshot_stale_seconds: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    # One engine step may delay snapshots for so long.
    step_timeout_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    sweep_timeout_seconds: Seconds = 120.0
    # "dcgm": dcgm-exporter has it, and the rules read its series; this service then asks no driver.
    device_health: Literal["nvml", "dcgm"] = "nvml"
    runbook_base: Address = RUNBOOK_BASE  # folder of the runbooks; empty = pages of incidents have no link
    rank_kept_seconds: Seconds = 3600.0  # after a rank left or fell silent, unless it is violated


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the commands that ask a service find it."""

    url: str = ""  # of the service; empty = http://127.0.0.1 and the setting `port`
    port: Annotated[int, Meta(ge=0, le=65535)] = DEFAULT_PORT
    token: str = ""
    token_file: str = ""  # a file that holds the token alone; it goes before `token`
    client_seconds: Annotated[float, Meta(gt=0, le=3600)] = 30.0  # for one answer


Settings = TypeVar("Settings", CanaryConfig, ServiceConfig, ClientConfig)
SECRETS = frozenset({"token"})
SETTING_NAMES = (
    frozenset(CanaryConfig.__struct_fields__)
    | frozenset(ServiceConfig.__struct_fields__)
    | frozenset(ClientConfig.__struct_fields__)
    | {"config"}
)


def load(
    settings_type: type[Settings],
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings of one process. Raises ConfigurationError for an unknown name or an invalid value."""
    environ = os.environ if environ is None else environ
    raw: dict[str, tuple[str, Any]] = {}
    if path := environ.get(FILE_VARIABLE):
        raw |= {name: (f"{path}: {name}", value) for name, value in _read_file(path).items()}
    for variable, text in environ.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name not in SETTING_NAMES or variable != variable.upper():
                raise _unknown(variable, name)
            raw[name] = (variable, text)
    raw |= {name: (f"--{name.replace('_', '-')}", value) for name, value in (overrides or {}).items()}
    fields = {field.name: field.type for field in msgspec.structs.fields(settings_type)}
    values = {
        name: _convert(label, fields[name], value, hidden=name in SECRETS)
        for name, (label, value) in raw.items()
        if name in fields
    }
    settings = settings_type(**values)
    labels = {name: label for name, (label, _) in raw.items()}
    if isinstance(settings, CanaryConfig):
        _check_canary(settings, labels)
    elif isinstance(settings, ServiceConfig):
        check_bind(
            settings.host, settings.token, settings.tokens_file,
            host_label=labels.get("host", "host"), token_label=labels.get("token", "token"),
        )  # fmt: skip
    return settings


def _read_file(path: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(_text_of(path))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            FILE_VARIABLE, path, f"cannot be read: {error}", "Name a readable TOML file."
        ) from None
    for name in content:
        if name not in SETTING_NAMES:
            raise _unknown(f"{path}: {name}", name)
    return content


def _text_of(path: str) -> str:
    # Without O_NONBLOCK, opening a named pipe would block the start until another process writes to it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a file")
        return file.read().decode()


def _unknown(label: str, name: str) -> ConfigurationError:
    close = difflib.get_close_matches(name, SETTING_NAMES, n=1)
    hint = f"Did you mean {PREFIX}{close[0].upper()}? " if close else ""
    allowed = ", ".join(sorted(SETTING_NAMES))
    return UnknownSetting(label, None, "no setting has this name", f"{hint}Settings are: {allowed}.")


def _convert(label: str, field_type: Any, value: Any, *, hidden: bool) -> Any:
    try:
        return msgspec.convert(value, field_type, strict=False)
    except msgspec.ValidationError as error:
        remedy = f"Use {_allowed(field_type)}."
        shown = HIDDEN if hidden else value
        raise ConfigurationError(label, shown, str(error).replace(" - at `$`", ""), remedy) from None


def _allowed(field_type: Any) -> str:
    if field_type in (Mode, HealPolicy):
        return " or ".join(word.value for word in field_type)
    if field_type is bool:
        return "true or false"
    if literals := [value for value in get_args(field_type) if isinstance(value, str)]:
        return " or ".join(literals)
    for meta in getattr(field_type, "__metadata__", ()):
        if meta.description:
            return str(meta.description)
    return "a valid value, or leave it out for the default"


def _check_canary(settings: CanaryConfig, labels: Mapping[str, str]) -> None:
    parse_patrol_budget(settings.patrol_budget, labels.get("patrol_budget", "patrol_budget"))
    parse_ranks(settings.expected_ranks, labels.get("expected_ranks", "expected_ranks"))
    label = labels.get("perturb", "perturb")
    modes = parse_perturb(settings.perturb, label)
    if modes and not settings.perturb_enabled:
        raise ConfigurationError(
            label,
            settings.perturb,
            "injecting corruption needs a second setting",
            f"Set {PREFIX}PERTURB_ENABLED=true too, or remove {label}.",
        )
    if modes and settings.mode is Mode.NONE:
        raise ConfigurationError(
            label, settings.perturb, "mode none would not detect it", "Use mode log or raise."
        )


def masked(settings: CanaryConfig | ServiceConfig | ClientConfig) -> dict[str, str]:
    """Every setting as text, secrets as ***; for Hello and logs."""
    shown = msgspec.structs.asdict(settings)
    return {name: "***" if name in SECRETS and value else str(value) for name, value in shown.items()}
