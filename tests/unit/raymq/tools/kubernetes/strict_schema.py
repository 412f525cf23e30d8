"""Strict schema of the Kubernetes objects that raymq creates: it allows only the fields that raymq uses.

The schema is written by hand after KubeRay's v1 types and Kubernetes' own types. KubeRay's definition has half a
megabyte and accepts any field of a pod. The strict schema finds a field that is misspelt, at the wrong level or of the
wrong type.
"""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
NUMBER: dict[str, Any] = {"type": "integer"}
PORT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
QUANTITY: dict[str, Any] = {"type": "string", "pattern": "^[0-9]+(m|Mi|Gi|Ti)?$"}


def strict(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object that must have the fields `required`, may have the fields `optional`, and has no
    other fields."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: dict[str, Any], least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": least}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def selecting(**more: Any) -> dict[str, Any]:
    return strict({"matchLabels": LABELS}, **more)


COMMAND = strict({"exec": strict({"command": many(TEXT)})})
RESOURCES = strict(
    {"requests": strict({"cpu": QUANTITY, "memory": QUANTITY}), "limits": strict({"cpu": QUANTITY, "memory": QUANTITY})}
)
CONTAINER = strict(
    {"name": NAME, "image": TEXT, "resources": RESOURCES, "ports": many(strict({"name": NAME, "containerPort": PORT}))},
    env=many(strict({"name": TEXT, "value": TEXT})),
    volumeMounts=many(strict({"name": NAME, "mountPath": TEXT}, readOnly={"type": "boolean"}), 0),
    lifecycle=strict({}, preStop=COMMAND, postStart=COMMAND),
)
VOLUME = {
    "oneOf": [
        strict({"name": NAME, "persistentVolumeClaim": strict({"claimName": NAME})}),
        strict({"name": NAME, "configMap": strict({"name": NAME})}),
    ]
}
AFFINITY = strict(
    {
        "podAntiAffinity": strict(
            {
                "requiredDuringSchedulingIgnoredDuringExecution": many(
                    strict({"topologyKey": TEXT, "labelSelector": selecting()})
                )
            }
        )
    }
)
POD = strict(
    {
        "metadata": strict({"labels": LABELS}),
        "spec": strict(
            {
                "terminationGracePeriodSeconds": NUMBER,
                "securityContext": strict(
                    {"fsGroup": NUMBER, "fsGroupChangePolicy": one_of("OnRootMismatch", "Always")}
                ),
                "containers": many(CONTAINER),
                "volumes": many(VOLUME, 0),
            },
            affinity=AFFINITY,
            nodeSelector=LABELS,
        ),
    }
)
WORKERS = strict(
    {
        "groupName": NAME,
        "replicas": NUMBER,
        "minReplicas": NUMBER,
        "maxReplicas": NUMBER,
        "rayStartParams": TEXTS,
        "template": POD,
    },
    labels=LABELS,
    resources=TEXTS,
)
HEAD = strict({"serviceType": one_of("ClusterIP"), "resources": TEXTS, "rayStartParams": TEXTS, "template": POD})


def thing(api: str, kind: str, **fields: Any) -> dict[str, Any]:
    return strict(
        {
            "apiVersion": {"const": api},
            "kind": {"const": kind},
            "metadata": strict({"name": NAME, "labels": LABELS}),
            **fields,
        }
    )


PEER = strict({}, namespaceSelector=strict({}), podSelector=strict({}, matchLabels=LABELS))
SCRAPE = strict(
    {
        "port": NAME,
        "interval": TEXT,
        "relabelings": many(strict({"action": TEXT, "sourceLabels": many(TEXT), "targetLabel": TEXT})),
    }
)
RULE = strict({"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": TEXTS}, **{"for": TEXT})

SCHEMAS = {
    "RayCluster": thing(
        "ray.io/v1",
        "RayCluster",
        spec=strict(
            {
                "rayVersion": TEXT,
                "authOptions": strict({"mode": one_of("token", "disabled")}),
                "headGroupSpec": HEAD,
                "workerGroupSpecs": many(WORKERS),
            }
        ),
    ),
    "PersistentVolumeClaim": thing(
        "v1",
        "PersistentVolumeClaim",
        spec=strict(
            {
                "accessModes": many(one_of("ReadWriteOncePod")),
                "resources": strict({"requests": strict({"storage": QUANTITY})}),
            },
            storageClassName=TEXT,
        ),
    ),
    "ConfigMap": thing("v1", "ConfigMap", data=TEXTS),
    "Service": thing(
        "v1",
        "Service",
        spec=strict(
            {
                "type": one_of("ClusterIP"),
                "selector": LABELS,
                "ports": many(strict({"name": NAME, "port": PORT, "targetPort": PORT})),
            }
        ),
    ),
    "NetworkPolicy": thing(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        spec=strict(
            {
                "podSelector": selecting(),
                "policyTypes": many(one_of("Ingress", "Egress")),
                "ingress": many(
                    strict({"from": many(PEER)}, ports=many(strict({"protocol": one_of("TCP"), "port": PORT})))
                ),
            }
        ),
    ),
    "PodDisruptionBudget": thing(
        "policy/v1",
        "PodDisruptionBudget",
        spec=strict(
            {
                "minAvailable": {"type": "integer", "minimum": 1},
                "unhealthyPodEvictionPolicy": one_of("AlwaysAllow", "IfHealthyBudget"),
                "selector": selecting(),
            }
        ),
    ),
    "PodMonitor": thing(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        spec=strict({"selector": selecting(), "podMetricsEndpoints": many(SCRAPE)}),
    ),
    "PrometheusRule": thing(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        spec=strict({"groups": many(strict({"name": TEXT, "rules": many(RULE)}))}),
    ),
    "Kustomization": strict(
        {
            "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
            "kind": {"const": "Kustomization"},
            "resources": many(TEXT),
        }
    ),
}
