"""What engines and their workers import on a CPU, for the process that they are forks of: tests/forked.py."""

from vllm import LLM, SamplingParams  # noqa: F401
from vllm.model_executor.models import llama  # noqa: F401
from vllm.v1.engine import core  # noqa: F401
from vllm.v1.executor import multiproc_executor, uniproc_executor  # noqa: F401
from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

from canary_obs.engines.vllm import worker  # noqa: F401
from tests.engines.vllm.real import rig  # noqa: F401
