"""Types of the names that canary_obs loads on first use."""

from canary_obs.attach import install_canary
from canary_obs.config import (
    CanaryConfig,
    ServiceConfig,
)
from canary_obs.engine_api.adapter import (
    EngineAdapter,
    PrefixCache,
)
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import (
    CachedCount,
    CachedSlots,
    ComparedTables,
    GroupStep,
    GroupView,
    KVAllocation,
    StepTypes,
    StepView,
)
from canary_obs.errors import (
    ConfigurationError,
    KVCacheViolation,
    UnsupportedEngine,
)
from canary_obs.serve import serve
from canary_obs.vocabulary import Mode

__all__ = [
    "CachedCount",
    "CachedSlots",
    "CanaryConfig",
    "ComparedTables",
    "ConfigurationError",
    "EngineAdapter",
    "GroupStep",
    "GroupView",
    "KVAllocation",
    "KVCacheViolation",
    "Mode",
    "Observer",
    "PrefixCache",
    "ServiceConfig",
    "StepTypes",
    "StepView",
    "UnsupportedEngine",
    "__version__",
    "install_canary",
    "serve",
]
__version__: str
