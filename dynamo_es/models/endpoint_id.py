"""Reading names of endpoints as leniently as Dynamo does where it does (spec/services a.2). Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_SCHEME = "dyn://"


class EndpointId(NamedTuple):
    """Namespace, component and endpoint."""

    namespace: str
    component: str
    name: str

    def __str__(self) -> str:
        return "/".join(self)


def parse_endpoint_id(text: str) -> EndpointId:
    """Parts split at ``.`` or ``/``, behind an optional ``dyn://``; what is missing has Dynamo's defaults.

    ``x`` is the component, ``a.b`` namespace and component, ``a.b.c`` all three; of more, the rest is the endpoint's.
    """
    parts = [part for part in re.split(r"[./]", text.removeprefix(_SCHEME)) if part]
    match parts:
        case []:
            return EndpointId("NS", "C", "E")
        case [component]:
            return EndpointId("NS", component, "E")
        case [namespace, component]:
            return EndpointId(namespace, component, "E")
        case [namespace, component, *rest]:
            return EndpointId(namespace, component, "_".join(rest))
    raise AssertionError("a list has some length")
