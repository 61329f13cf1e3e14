"""The JSON schema of the exported vectors (draft 2020-12); every export has it as schema.json."""

from __future__ import annotations

from typing import Any

FORMAT = "nvfp4-vectors"

_RULE = {"type": "string", "pattern": "^[A-Z0-9]+(-[A-Z0-9]+)*$"}
_NAME = {"type": "string", "pattern": "^[^\\s]+$"}
_COUNT = {"type": "integer", "minimum": 0}
_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TYPE = {"enum": ["e2m1", "e4m3", "e8m0", "u8", "u16", "u32", "u64", "f16", "bf16", "f32"]}


def _object(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": required,
        "additionalProperties": False,
        **more,
    }


_HEAD: dict[str, Any] = {
    "format": {"const": FORMAT},
    "version": {"const": 1},
    "spec": {"type": "string", "pattern": "^[0-9]+\\.[0-9]+$"},
}
_SIZE = {"enum": ["small", "full"]}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "NVFP4 vectors: index.json, and the groups that it lists",
    "oneOf": [{"$ref": "#/$defs/index"}, {"$ref": "#/$defs/group"}],
    "$defs": {
        "index": _object(
            {
                **_HEAD,
                "kind": {"const": "index"},
                "size": _SIZE,
                "producer": _object({"name": {"type": "string"}, "version": {"type": "string"}}),
                "types": {"type": "object", "propertyNames": _TYPE, "additionalProperties": {"type": "string"}},
                "groups": {
                    "type": "array",
                    "minItems": 1,
                    "items": _object(
                        {
                            "rule": _RULE,
                            "file": {"type": "string", "pattern": "^[A-Z0-9-]+\\.json$"},
                            "sha256": _SHA256,
                            "data": {"type": "string", "pattern": "^[A-Z0-9-]+\\.bin$"},
                            "data_sha256": _SHA256,
                            "bytes": _COUNT,
                            "results": _COUNT,
                        }
                    ),
                },
                "not_covered": {
                    "type": "array",
                    "items": _object({"rule": _RULE, "why": {"type": "string", "minLength": 1}}),
                },
            }
        ),
        "group": _object(
            {
                **_HEAD,
                "kind": {"const": "group"},
                "size": _SIZE,
                "rule": _RULE,
                "documentation": {"type": "string"},
                "data": {"type": "string", "pattern": "^[A-Z0-9-]+\\.bin$"},
                "hunts": {"type": "array", "items": {"$ref": "#/$defs/fault"}},
                "sets": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/set"}},
            }
        ),
        "fault": _object(
            {
                "deviation": {"type": ["string", "null"], "description": "an id of docs/deviations.md"},
                "fault": {"type": "string", "minLength": 1},
                "changes": {"type": "integer", "minimum": 1, "description": "results of this group that it changes"},
                "first": _object({"set": _NAME, "result": _COUNT}),
            }
        ),
        "set": _object(
            {
                "name": _NAME,
                "operation": _NAME,
                "what": {"type": "string"},
                "rows": {"type": "boolean", "description": "each array has a row for each row of the others"},
                "results": {"type": "integer", "minimum": 1},
                "covers": _object(
                    {
                        "inputs": {"type": "integer", "minimum": 1},
                        "of": {"type": ["string", "null"], "pattern": "^2\\^[0-9]+$"},
                        "exhaustive": {"type": "boolean"},
                    }
                ),
                "parameters": {"type": "object"},
                "arrays": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/array"}},
            }
        ),
        "array": _object(
            {
                "role": {"enum": ["operand", "result"]},
                "name": _NAME,
                "type": _TYPE,
                "shape": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1}},
                "offset": {"type": "integer", "minimum": 0, "multipleOf": 16},
                "bytes": {"type": "integer", "minimum": 1},
            }
        ),
    },
}
