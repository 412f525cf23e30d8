"""Tests that the files in k8s/ are the output of `raymq k8s render`, and that each object is well-formed.

All names, ports, paths and settings must agree with each other and with the code.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from click.testing import CliRunner

from raydp_jobs.executor_places import executor_size, memory_mib
from raymq.client.cluster.java import java_on_path, needed_java
from raymq.common.config.cluster import DATA_DIR_VARIABLE, ClusterSettings
from raymq.common.errors import InvalidArgumentError
from raymq.tools.cli import cli
from raymq.tools.kubernetes.cluster_shape import DATA_MOUNT, STORE_LABEL, ClusterShape
from raymq.tools.kubernetes.ray_cluster import HEALTH_CHECKS, RAY_VERSION
from raymq.tools.kubernetes.render import rendered_files
from tests.unit.raymq.tools.kubernetes.strict_schema import SCHEMAS

ROOT = Path(__file__).parents[5]
SHAPES = {"k8s": ClusterShape(), "k8s/one-store": ClusterShape(stores=1)}
OTHERS = [
    ClusterShape(
        stores=5,
        zones=("a", "b"),
        storage_class="fast",
        name="other",
        image="registry/raymq:2",
        size="1Ti",
        gateway=True,
        spark_pods=2,
    )
]

each_shape = pytest.mark.parametrize("shape", [*SHAPES.values(), *OTHERS], ids=lambda shape: f"{shape.stores} stores")


def objects(shape: ClusterShape) -> list[dict[str, Any]]:
    texts = [text for name, text in rendered_files(shape).items() if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text)]


def of_kind(shape: ClusterShape, kind: str) -> list[dict[str, Any]]:
    return [one for one in objects(shape) if one["kind"] == kind]


def groups(shape: ClusterShape) -> list[dict[str, Any]]:
    """Return all groups of pods: the groups of the head, of the stores, of computing, and of Spark if there is one."""
    [cluster] = of_kind(shape, "RayCluster")
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def stores(shape: ClusterShape) -> list[dict[str, Any]]:
    return [group for group in groups(shape) if group.get("groupName", "").startswith("store-")]


def container(group: dict[str, Any]) -> dict[str, Any]:
    [only] = group["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("folder", SHAPES)
def test_the_files_in_the_repository_equal_the_commands_output(folder: str) -> None:
    written = {path.name: path.read_text() for path in (ROOT / folder).iterdir() if path.is_file()}
    assert written == rendered_files(SHAPES[folder])


@pytest.mark.parametrize("folder", SHAPES)
def test_the_command_in_the_files_writes_them_again(folder: str, tmp_path: Path) -> None:
    [command] = {text.splitlines()[0] for text in (p.read_text() for p in (ROOT / folder).glob("*.yaml"))}
    words = shlex.split(command.removeprefix("# Made by: raymq "))
    result = CliRunner().invoke(cli, [*words, "--output", str(tmp_path), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == set(rendered_files(SHAPES[folder]))
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / folder / path.name).read_text()


@each_shape
def test_every_object_is_well_formed(shape: ClusterShape) -> None:
    for one in objects(shape):
        jsonschema.validate(one, SCHEMAS[one["kind"]])


@pytest.mark.parametrize(
    "misspell",
    [
        lambda cluster: cluster["spec"].update(workerGroupSpec=[]),
        lambda cluster: cluster["spec"]["workerGroupSpecs"][0].update(minReplica=1),
        lambda cluster: cluster["spec"]["workerGroupSpecs"][0].update(replicas="1"),
        lambda cluster: cluster["spec"]["headGroupSpec"]["template"]["spec"].update(volume=[]),
        lambda cluster: cluster["spec"]["headGroupSpec"]["template"]["spec"]["volumes"].append(
            {"name": "data", "emptyDir": {}}
        ),
    ],
)
def test_a_mistake_is_found(misspell: Any) -> None:
    [cluster] = copy.deepcopy(of_kind(ClusterShape(), "RayCluster"))
    misspell(cluster)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, SCHEMAS["RayCluster"])


@each_shape
def test_each_store_has_one_pod_and_a_claim_of_its_own(shape: ClusterShape) -> None:
    claims = {one["metadata"]["name"]: one["spec"] for one in of_kind(shape, "PersistentVolumeClaim")}
    used = []
    for group in groups(shape):
        used += [
            v["persistentVolumeClaim"]["claimName"]
            for v in group["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in v
        ]
    assert sorted(used) == sorted(claims)
    assert len(stores(shape)) == shape.stores == len(claims) - 1
    for number, group in enumerate(stores(shape)):
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 1)
        assert group["labels"][STORE_LABEL] == str(number)
        assert claims[f"{shape.name}-store-{number}"]["resources"]["requests"]["storage"] == shape.size
        assert claims[f"{shape.name}-store-{number}"].get("storageClassName") == shape.storage_class


@each_shape
def test_data_is_on_the_claim_and_nowhere_else(shape: ClusterShape) -> None:
    [settings] = of_kind(shape, "ConfigMap")
    data_dir = yaml.safe_load(settings["data"]["raymq.yaml"])["data_dir"]
    assert data_dir == str(DATA_MOUNT)
    for group in groups(shape):
        if group.get("groupName") in ("compute", "spark"):
            continue
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert "persistentVolumeClaim" in volumes[mounts[data_dir]]
        assert container(group)["env"] == [{"name": DATA_DIR_VARIABLE, "value": data_dir}]
    text = "".join(rendered_files(shape).values())
    assert "emptyDir" not in text
    assert "ephemeral" not in text


@each_shape
def test_stores_are_placed_only_where_a_volume_is(shape: ClusterShape) -> None:
    [settings] = of_kind(shape, "ConfigMap")
    read = ClusterSettings.model_validate(yaml.safe_load(settings["data"]["raymq.yaml"]))
    label = read.placement.node_label
    carrying = [group for group in groups(shape) if label in group.get("labels", {})]
    assert carrying == stores(shape)
    assert read.replication.replicas <= shape.stores
    assert read.broker_groups == shape.stores


@each_shape
def test_one_pod_starts_raymq_when_all_stores_are_there(shape: ClusterShape, tmp_path: Path) -> None:
    hooks = [container(group).get("lifecycle", {}).get("postStart") for group in groups(shape)]
    [hook] = [hook for hook in hooks if hook]
    [_, _, script] = hook["exec"]["command"]
    assert script.endswith("&"), "Kubernetes waits for the hook, and KubeRay starts Ray behind it"
    words = shlex.split(re.search(r"until (raymq .*?); do", script)[1])
    command = cli.commands["up"]
    parsed = command.make_context("up", words[2:]).params
    assert parsed["wait_nodes"] == shape.stores
    mounts = {mount["mountPath"]: mount["name"] for mount in container(stores(shape)[0])["volumeMounts"]}
    assert mounts[str(parsed["config"].parent)] == "settings"
    assert parsed["config"].name in of_kind(shape, "ConfigMap")[0]["data"]
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0


@each_shape
def test_stores_close_before_their_pod_ends(shape: ClusterShape) -> None:
    for group in stores(shape):
        words = shlex.split(container(group)["lifecycle"]["preStop"]["exec"]["command"][2])
        close = cli.commands["store"].commands["close"]
        assert words[:3] == ["raymq", "store", "close"]
        close.make_context("close", words[3:])
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 30


@each_shape
def test_no_two_stores_are_on_one_machine(shape: ClusterShape) -> None:
    for group in stores(shape):
        [rule] = group["template"]["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        wanted = rule["labelSelector"]["matchLabels"]
        # KubeRay adds the label ray.io/cluster to each pod, so the rendered file does not contain it.
        given = group["template"]["metadata"]["labels"] | {"ray.io/cluster": shape.name}
        assert wanted.items() <= given.items()


def budgets(shape: ClusterShape) -> dict[str, int]:
    """Return for each PodDisruptionBudget how many of the pods that it selects may be evicted at a time, by the name of
    the budget."""
    pods = []
    for group in groups(shape):
        # KubeRay adds these two labels to each pod, so the rendered file does not contain them.
        kind = "worker" if "groupName" in group else "head"
        labels = group["template"]["metadata"]["labels"] | {"ray.io/cluster": shape.name, "ray.io/node-type": kind}
        pods += [labels] * group.get("replicas", 1)
    found = {}
    for budget in of_kind(shape, "PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"]
        selected = [labels for labels in pods if wanted.items() <= labels.items()]
        assert selected
        found[budget["metadata"]["name"]] = len(selected) - budget["spec"]["minAvailable"]
    return found


@each_shape
def test_one_of_several_stores_is_evicted_at_a_time_and_the_head_never(shape: ClusterShape) -> None:
    assert budgets(shape) == {f"{shape.name}-stores": int(shape.stores > 1), f"{shape.name}-head": 0}
    [settings] = of_kind(shape, "ConfigMap")
    replication = ClusterSettings.model_validate(yaml.safe_load(settings["data"]["raymq.yaml"])).replication
    if shape.stores >= 3:  # with three replicas, a broker group takes messages while one store is away
        assert replication.min_in_sync_replicas <= replication.replicas - 1
    assert "disruption.yaml" in rendered_files(shape)["kustomization.yaml"]


def room(pod: dict[str, Any]) -> dict[str, float]:
    """Return the Ray resources of a group's pod: KubeRay takes CPU and memory from the limits of the container."""
    limits = container(pod)["resources"]["limits"]
    memory = memory_mib(limits["memory"].removesuffix("i")) << 20
    more = {name: float(amount) for name, amount in pod.get("resources", {}).items()}
    return {"CPU": float(limits["cpu"]), "memory": float(memory), **more}


def test_the_session_of_the_page_finds_room_in_the_pods_for_spark_only() -> None:
    [shape] = OTHERS
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [program] = re.findall(
        r"^    with raymq.connect.*?spark_session\((.*?)\n    \) as spark:", page, re.MULTILINE | re.DOTALL
    )
    call = ast.parse(f"spark_session({program})").body[0]
    seen = {one.arg: ast.literal_eval(one.value) for one in ast.walk(call) if isinstance(one, ast.keyword)}
    size = executor_size(seen["executor_cores"], memory_mib(seen["executor_memory"]), seen["configs"])
    fitting = {group.get("groupName", "head"): size.fits(room(group)) for group in groups(shape)}
    assert fitting.pop("spark") == 1, "one executor in each pod"
    assert set(fitting.values()) == {0}
    [spark] = [group for group in groups(shape) if group.get("groupName") == "spark"]
    assert [spark[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2] == [seen["executors"]] * 3
    assert seen["beside_storage"] is False
    assert size.memory_bytes <= 0.5 * room(spark)["memory"], "object store and Python workers need memory, too"


@each_shape
def test_a_cluster_has_pods_for_spark_only_on_request(shape: ClusterShape) -> None:
    found = [group["replicas"] for group in groups(shape) if group.get("groupName") == "spark"]
    assert found == [shape.spark_pods] * bool(shape.spark_pods)


def test_zones_are_on_the_pods_and_on_the_ray_nodes() -> None:
    [shape] = OTHERS
    zones = [group["labels"]["ray.io/availability-zone"] for group in stores(shape)]
    assert zones == ["a", "b", "a", "b", "a"]
    selected = [group["template"]["spec"]["nodeSelector"]["topology.kubernetes.io/zone"] for group in stores(shape)]
    assert selected == zones


@each_shape
def test_the_console_is_where_its_service_leads(shape: ClusterShape) -> None:
    [settings] = of_kind(shape, "ConfigMap")
    console = ClusterSettings.model_validate(yaml.safe_load(settings["data"]["raymq.yaml"])).console
    assert console.enable
    assert not console.is_loopback
    service = services(shape)["console"]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [console.port]


def services(shape: ClusterShape) -> dict[str, dict[str, Any]]:
    """Return the Services of a cluster, by the name of the port to which each leads."""
    return {one["spec"]["ports"][0]["name"]: one for one in of_kind(shape, "Service")}


@each_shape
def test_the_gateway_is_where_its_service_leads_if_the_cluster_has_one(shape: ClusterShape) -> None:
    [settings] = of_kind(shape, "ConfigMap")
    gateway = ClusterSettings.model_validate(yaml.safe_load(settings["data"]["raymq.yaml"])).gateway
    assert gateway.enable == shape.gateway == ("gateway" in services(shape))
    if shape.gateway:
        service = services(shape)["gateway"]
        assert (service["metadata"]["name"], service["spec"]["type"]) == (f"{shape.name}-gateway", "ClusterIP")
        assert [port["targetPort"] for port in service["spec"]["ports"]] == [gateway.port, gateway.http_port]
        assert "--gateway" in rendered_files(shape)["gateway.yaml"].splitlines()[0]
        assert "gateway.yaml" in rendered_files(shape)["kustomization.yaml"]


@each_shape
def test_ports_have_one_meaning(shape: ClusterShape) -> None:
    """Each port that a Service, the PodMonitor or the NetworkPolicy names is a port that a container opens."""
    [head, *others] = groups(shape)
    opened = {port["name"]: port["containerPort"] for port in container(head)["ports"]}
    for name, service in services(shape).items():
        assert service["spec"]["ports"][0]["targetPort"] == opened[name]
        assert all(port["targetPort"] == opened[port["name"]] for port in service["spec"]["ports"])
    [monitor] = of_kind(shape, "PodMonitor")
    name = monitor["spec"]["podMetricsEndpoints"][0]["port"]
    for group in others:
        assert {"name": name, "containerPort": opened[name]} in container(group)["ports"]
    [policy] = of_kind(shape, "NetworkPolicy")
    allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
    assert {opened["console"], opened[name], opened["dashboard"]} <= allowed
    assert (opened.get("gateway") in allowed) == (opened.get("gateway-http") in allowed) == shape.gateway


@each_shape
def test_versions_match_the_lock_file_and_raymq(shape: ClusterShape) -> None:
    assert ray.__version__ == RAY_VERSION
    dockerfile = rendered_files(shape)["Dockerfile"]
    assert f"FROM rayproject/ray:{RAY_VERSION}-py311\n" in dockerfile
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ClusterShape().image == f"raymq:{version}"
    assert ClusterShape().image in dockerfile
    assert {container(group)["image"] for group in groups(shape)} == {shape.image}


class Image:
    """A folder in place of the Kubernetes image, whose PATH has no Java. Its `python` installs nothing with pip, and
    runs every other program with this Python. `find_java`: the shell command that answers when the RUN line looks for
    Java; by default the line's own program runs."""

    def __init__(self, root: Path, find_java: str = "") -> None:
        self.root = root
        self.programs, system = root / "bin", root / "system"
        self.installed = root / "installed"
        self.programs.mkdir()
        system.mkdir()
        for program in ("sh", "ln", "dirname", "rm"):
            (system / program).symlink_to(str(shutil.which(program)))
        python = self.programs / "python"
        python.write_text(
            f"#!{shutil.which('sh')}\n"
            f'if [ "$1 $2" = "-m pip" ]; then echo "$@" >> {shlex.quote(str(self.installed))}; exit; fi\n'
            f"{find_java}\n"
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        python.chmod(0o755)
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "JAVA_HOME"},
            "PATH": f"{self.programs}{os.pathsep}{system}",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        assert shutil.which("java", path=self.environ["PATH"]) is None

    def run(self) -> int:
        """Run the whole RUN line of the Dockerfile, with the image's /tmp/raymq in this folder. Returns the exit code
        of the line."""
        [line] = re.findall(r"^RUN ((?:.*\\\n)*.+)", rendered_files(ClusterShape())["Dockerfile"], re.MULTILINE)
        command = line.replace("/tmp/raymq", shlex.quote(str(self.root / "raymq")))
        return subprocess.run(
            ["sh", "-c", command], env=self.environ, cwd=self.root, timeout=60, check=False
        ).returncode


@pytest.mark.parametrize("find_java", ["exit 1", "echo; exit 1"], ids=["silent", "with output"])
def test_an_image_without_a_java_is_not_built(tmp_path: Path, find_java: str) -> None:
    image = Image(tmp_path, find_java)
    assert image.run() != 0
    assert not (image.programs / "java").is_symlink()


def test_spark_finds_the_java_of_the_image_on_the_path_of_ray(tmp_path: Path) -> None:
    """Run the RUN line of the Dockerfile, as in an image whose PATH has no Java, and the check of a node that runs
    before Spark starts there."""
    image = Image(tmp_path)
    environ = image.environ
    assert image.run() == 0
    assert [line.split()[2] for line in image.installed.read_text().splitlines()] == ["install", "install"]
    java = java_on_path(environ)
    assert java is not None
    assert java.major in needed_java().preferred
    check = (
        "import sys; from raydp_jobs.executor_places import _probe_by_value, node_needs\n"
        "print(_probe_by_value()(node_needs(sys.executable), sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, str(tmp_path / "spark")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_health_checks_match_cluster_yaml() -> None:
    [config] = re.findall(r"--system-config='(\{.*?\})'", (ROOT / "cluster.yaml").read_text(), re.DOTALL)
    assert yaml.safe_load(config) == HEALTH_CHECKS
    [head, *_] = groups(ClusterShape())
    [word] = shlex.split(head["rayStartParams"]["system-config"])
    assert yaml.safe_load(word) == HEALTH_CHECKS


@pytest.mark.parametrize("folder", SHAPES)
def test_kustomize_builds_it(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOT / folder)], capture_output=True, text=True, timeout=60, check=True
    )
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout)]
    assert sorted(set(kinds)) == [
        "ConfigMap",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "RayCluster",
        "Service",
    ]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"stores": 0}, "stores must be 1 to 26"),
        ({"stores": 27}, "stores must be 1 to 26"),
        ({"spark_pods": -1}, "spark_pods must be 0 to 100"),
        ({"size": "200"}, "200Gi"),
        ({"size": "0Gi"}, "200Gi"),
        ({"name": "Raymq"}, "cannot be the name of a RayCluster"),
    ],
)
def test_an_invalid_cluster_shape_is_refused(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidArgumentError, match=refusal):
        ClusterShape(**options)
