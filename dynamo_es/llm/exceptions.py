"""The exceptions of Dynamo's ``dynamo.llm.exceptions``."""

from dynamo_es.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
)
from dynamo_es.router.errors import RouterQueueLimitExceeded, SelectionServiceError

__all__ = (
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "InvalidArgument",
    "RouterQueueLimitExceeded",
    "SelectionServiceError",
    "StreamIncomplete",
    "Unknown",
)
