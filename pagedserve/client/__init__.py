"""The client library: Client (blocking) and AsyncClient. Text is made here, at the edge; the server knows token ids."""

from pagedserve.client.aio import AsyncClient, AsyncStream
from pagedserve.client.results import Completion, Delta, Output, Timing, Usage
from pagedserve.client.sync import Client, Stream
from pagedserve.contract.sampling import SamplingParams

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "Output",
    "SamplingParams",
    "Stream",
    "Timing",
    "Usage",
]
