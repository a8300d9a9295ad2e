"""Manifests: made from the run's config, whole and strict, and as safe as they claim."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from committed import FILES, FOLDER, ROOT, cluster_spec, documents, read_command
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jobs import deploy
from t2g.config import PolicyJob, loading
from t2g.deploy import manifests, render_manifests, submission
from t2g.deploy.manifests import resource_name
from t2g.errors import UserError

SCHEMAS = ROOT.parent / "shared" / "kuberay"
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def policy(*overrides: str, file: str = "configs/tiny/policy.yaml") -> PolicyJob:
    return loading.load(PolicyJob, ROOT / file, overrides, environ={}, cwd=ROOT)


def render(config: PolicyJob, **changes: Any) -> dict[str, Any]:
    options = {"config_path": "configs/tiny/policy.yaml", "target": "rayjob", "cpu": True} | changes
    return documents(render_manifests(config, **options))[1]


def strict(schema: Any) -> Any:
    """The same schema with unknown keys refused wherever it knows the keys."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made_strict = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made_strict["additionalProperties"] = False
    return made_strict


def schema_errors(main: dict[str, Any]) -> list[str]:
    file = SCHEMAS / f"{main['kind'].lower()}-v1.json"
    if not file.exists():
        pytest.skip("the operator's schemas are not here")
    schema = strict(json.loads(file.read_text())["openAPIV3Schema"])
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(main)]


def pods(main: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Pod specs of all kinds, the submitter's last."""
    spec = cluster_spec(main)
    yield spec["headGroupSpec"]["template"]["spec"]
    yield from (group["template"]["spec"] for group in spec["workerGroupSpecs"])
    if main["kind"] == "RayJob":
        yield main["spec"]["submitterPodTemplate"]["spec"]


def test_there_are_a_job_a_cluster_and_a_cpu_variant() -> None:
    assert {file.stem for file in FILES} == {"rayjob", "raycluster", "rayjob-cpu"}


@by_file
def test_committed_files_are_what_render_makes(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == read_command(file).render()


@by_file
def test_the_command_in_the_first_line_makes_the_file(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = file.read_text(encoding="utf-8")
    words = shlex.split(text.splitlines()[0].removeprefix("# Made by: "))
    assert words[:3] == ["python", "-m", "jobs.deploy"]
    assert deploy.main(words[3:]) == 0
    assert capsys.readouterr().out == text


@by_file
def test_the_schema_takes_them_strictly(file: Path) -> None:
    assert schema_errors(documents(file.read_text(encoding="utf-8"))[1]) == []


@pytest.mark.parametrize(
    ("path", "key"),
    [((), "backofLimit"), (("rayClusterSpec",), "enableAutoscaling"), (("rayClusterSpec", "headGroupSpec"), "image")],
)
def test_the_schema_sees_a_key_that_is_none(path: tuple[str, ...], key: str) -> None:
    main = documents((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))[1]
    section = main["spec"]
    for name in path:
        section = section[name]
    section[key] = "x"
    errors = schema_errors(main)
    assert len(errors) == 1
    assert key in errors[0]


def test_the_schema_sees_a_key_that_is_none_deep_in_a_pod() -> None:
    main = documents((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))[1]
    next(pods(main))["containers"][0]["securityContext"]["runAsNonroot"] = True
    assert len(schema_errors(main)) == 1


@by_file
def test_pods_run_without_privileges_and_without_a_service_account_token(file: Path) -> None:
    main = documents(file.read_text(encoding="utf-8"))[1]
    for pod in pods(main):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["restartPolicy"] == "Never"
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@by_file
def test_only_the_autoscaler_gets_the_token_of_the_service_account(file: Path) -> None:
    spec = cluster_spec(documents(file.read_text(encoding="utf-8"))[1])
    head = spec["headGroupSpec"]["template"]["spec"]
    (volume,) = [volume["name"] for volume in head["volumes"] if "projected" in volume]
    assert [mount["name"] for mount in spec["autoscalerOptions"]["volumeMounts"]] == [volume]
    assert volume not in [mount["name"] for mount in head["containers"][0]["volumeMounts"]]
    for group in spec["workerGroupSpecs"]:
        assert all("projected" not in volume for volume in group["template"]["spec"]["volumes"])


@by_file
def test_every_process_wants_the_token_and_no_secret_is_written_out(file: Path) -> None:
    main = documents(file.read_text(encoding="utf-8"))[1]
    assert cluster_spec(main)["authOptions"] == {"mode": "token", "secretName": "t2g-ray-token"}
    for pod in pods(main):
        env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "t2g-ray-token", "key": "auth_token"}
        values = [name for name, entry in env.items() if re.search("TOKEN|KEY|SECRET", name) and "value" in entry]
        assert values == []
    assert "kind: Secret" not in file.read_text(encoding="utf-8")


@by_file
def test_a_node_has_time_to_drain(file: Path) -> None:
    for pod in [*pods(documents(file.read_text(encoding="utf-8"))[1])][:4]:
        env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
        assert pod["terminationGracePeriodSeconds"] > int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])


@by_file
def test_shared_memory_holds_the_object_store_and_the_pod_holds_both(file: Path) -> None:
    spec = cluster_spec(documents(file.read_text(encoding="utf-8"))[1])
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shared-mem"]
        shm_gib = int(shm["sizeLimit"].removesuffix("Gi"))
        store = int(group["rayStartParams"]["object-store-memory"])
        memory = pod["containers"][0]["resources"]["limits"]["memory"]
        workers = int(group.get("resources", {}).get("memory", 0))
        assert shm["medium"] == "Memory"
        assert store < shm_gib * 2**30
        assert workers + shm_gib * 2**30 < int(memory.removesuffix("Gi")) * 2**30


def test_worker_groups_are_those_of_the_config() -> None:
    config = policy(
        "rollout.workers={min: 1, initial: 2, max: 5}",
        "rollout.labels.pool=spot",
        "learner.workers=4",
        "learner.cpus=1.5",
        "learner.memory_gib=3",
    )
    groups = {group["groupName"]: group for group in cluster_spec(render(config))["workerGroupSpecs"]}
    bounds = {n: (g["minReplicas"], g["replicas"], g["maxReplicas"]) for n, g in groups.items()}
    assert bounds == {"learner": (1, 1, 1), "rollout": (1, 2, 5), "reward": (1, 1, 1)}
    assert groups["rollout"]["labels"] == {"rl/role": "rollout", "pool": "spot"}
    assert groups["reward"]["labels"] == {"rl/role": "reward"}
    assert groups["learner"]["resources"] == {"CPU": "6", "memory": str(12 * 2**30)}
    assert [name for name, group in groups.items() if "idleTimeoutSeconds" in group] == ["rollout", "reward"]


def test_a_critic_of_its_own_has_a_group_and_a_program_for_feedback_has_none() -> None:
    config = policy("learner.critic_ranks={workers: 2}", "feedback={source: program}")
    names = [group["groupName"] for group in cluster_spec(render(config))["workerGroupSpecs"]]
    assert names == ["learner", "critic", "rollout"]


def test_gpus_are_limits_of_their_pods_only() -> None:
    config = policy("data.path=/mnt/t2g/x.json", file="configs/slf5k/policy.yaml")
    main = render(config, cpu=False)
    limits = [pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for pod in pods(main)]
    assert limits == [None, "6", "1", "1", None]  # head, learner, rollout, reward, submitter
    with pytest.raises(UserError, match=r"learner\.gpus is not 0"):
        render(config, cpu=True)


def test_an_engine_and_a_rank_in_two_pods_share_no_gpu() -> None:
    one_each = ("rollout.gpus=0.7", "learner.gpus=0.3", "rollout.workers={initial: 2, min: 2}", "learner.workers=2")
    config = policy("cluster.gpu_sharing=split", *one_each)
    with pytest.raises(UserError, match=r"cluster\.gpu_sharing=split: pods share no GPU"):
        render(config, cpu=False)


def test_the_driver_reads_the_same_config_and_writes_on_the_claim() -> None:
    overrides = ["rollout.workers={min: 1, max: 3}", "run.name=it's"]
    main = render(policy("rollout.workers={min: 1, max: 3}"), overrides=overrides)
    received = subprocess.run(
        ["bash", "-ec", f"printf '%s\\n' -- {main['spec']['entrypoint']} ; true"],  # as the operator's submitter has it
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip
    expected = ["exec", "python", "-m", "jobs.train_policy", "--config", "configs/tiny/policy.yaml"]
    assert received == ["--", *expected, *overrides, "run.root=/mnt/t2g/runs"]


def test_a_stopped_run_may_write_its_checkpoint() -> None:
    main = render(policy("learner.step_timeout_s=700"))
    env = {e["name"]: e.get("value") for e in next(pods(main))["containers"][0]["env"]}
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= 700


@pytest.mark.parametrize(
    ("root", "mount"), [("/mnt/t2g/mine", "/mnt/t2g"), ("/data/team/runs", "/data/team"), ("/data/runs", "/data")]
)
def test_a_run_root_that_is_given_is_kept_and_the_claim_is_mounted_above_it(root: str, mount: str) -> None:
    main = render(policy(f"run.root={root}"), overrides=[f"run.root={root}"])
    assert main["spec"]["entrypoint"].endswith(f"configs/tiny/policy.yaml run.root={root}")
    for pod in [*pods(main)][:-1]:
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared-mem": "/dev/shm", "data": mount}
        env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
        assert env["HF_HOME"] == f"{mount}/huggingface"


@pytest.mark.parametrize("root", ["/runs", "/opt/t2g/runs", "/tmp/runs", "/usr/local/runs"])
def test_a_run_root_whose_mount_would_hide_the_image_is_refused(root: str) -> None:
    with pytest.raises(UserError, match=f"run.root={root}: the volume would be mounted at"):
        render(policy(f"run.root={root}"))


def test_a_relative_run_root_means_nothing_on_a_pod(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["render", "--config", str(ROOT / "configs/slf5k/policy.yaml"), "run.root=here"]
    assert deploy.main(words) == 2
    assert "run.root: got 'here', but a Ray job needs an absolute path" in capsys.readouterr().err


JOBS: dict[str, tuple[str, list[str], list[tuple[str, int]]]] = {
    "annotate": ("own/annotate.yaml", ["annotate.responses=policy", "model.policy=a/b"], [("rollout", 1)]),
    "sft": ("own/sft.yaml", ["sft.workers=4"], [("learner", 1)]),
    "reward": ("own/reward.yaml", [], [("learner", 1), ("reward", 0)]),
    "policy": ("own/one_gpu.yaml", ["cluster.gpu_sharing=none"], [("learner", 1), ("rollout", 1)]),
    "evaluate": ("own/evaluate.yaml", [], [("reward", 1)]),
    "evaluate_policy": ("own/evaluate_policy.yaml", [], [("rollout", 1)]),
    "compare": ("tiny/compare.yaml", [], [("learner", 1), ("rollout", 1), ("reward", 1)]),
}


def load_for_cluster(job_kind: str, file: str, overrides: Sequence[str]) -> Any:
    """Return the config of a job on a cluster of four GPUs, from which `auto` follows."""
    resources = {"GPU": 4, "memory": 256 * 2**30}
    schema = submission.JOBS[job_kind].schema
    return loading.load(
        schema, ROOT / file, overrides, environ={}, cwd=ROOT, find_resources=lambda address: resources
    )  # fmt: skip


def test_every_job_kind_has_a_job_of_its_own_and_the_groups_that_it_needs() -> None:
    assert JOBS.keys() == submission.JOBS.keys()
    rendered = []
    for job_kind, (name, overrides, groups) in JOBS.items():
        file = f"configs/{name}"
        config = load_for_cluster(job_kind, file, overrides)
        main = render(config, config_path=file, cpu=False, job_kind=job_kind)
        rendered.append(main)
        program = submission.JOBS[job_kind].program
        worker_groups = cluster_spec(main)["workerGroupSpecs"]
        assert f"exec python -m {program} " in main["spec"]["entrypoint"]
        assert [(group["groupName"], group["replicas"]) for group in worker_groups] == groups, job_kind
        assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in worker_groups)
    assert not any(map(schema_errors, rendered))  # last: where the schemas are not, the rest is tested


def test_the_drivers_secrets_come_from_one_secret() -> None:
    llm = "feedback={source: llm, llm: {url: 'https://h/v1', model: m, key_env: TEAM_KEY}}"
    config = policy(llm, "log.trackers=[wandb]")
    head, *workers, _ = pods(render(config))
    env = {entry["name"]: entry for entry in head["containers"][0]["env"]}
    for name in ("TEAM_KEY", "WANDB_API_KEY"):
        assert env[name] == {"name": name, "valueFrom": {"secretKeyRef": {"name": "t2g-keys", "key": name}}}
        assert all(name not in json.dumps(pod) for pod in workers), "only the driver asks"
    text = render_manifests(config, config_path="c.yaml", target="rayjob", cpu=True)
    assert "t2g-keys must be there too, with TEAM_KEY, WANDB_API_KEY" in text.splitlines()[2]


def test_an_empty_node_takes_no_driver_and_no_rank() -> None:
    _, budget, main = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))
    (chosen,) = budget["spec"]["selector"]["matchExpressions"]
    groups = [group["groupName"] for group in cluster_spec(main)["workerGroupSpecs"]]
    (learner,) = [group for group in cluster_spec(main)["workerGroupSpecs"] if group["groupName"] == "learner"]
    assert budget["spec"]["minAvailable"] == 1 + learner["maxReplicas"]  # the head as well
    assert chosen["key"] == "ray.io/group"
    assert [name for name in groups if name in chosen["values"]] == ["learner"]
    assert "headgroup" in chosen["values"]
    assert budget["spec"]["selector"]["matchLabels"] == {"t2g/cluster": main["metadata"]["name"]}


KUSTOMIZATION = FOLDER / "kustomization.yaml"


def find_section(document: Any, path: str) -> tuple[Any, str]:
    """Return the section of a JSON patch's path, and the last part of the path."""
    *parents, last = (part.replace("~1", "/") for part in path.removeprefix("/").split("/"))
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    return document, last


def test_the_example_of_kustomize_patches_the_rendered_run() -> None:
    example = yaml.safe_load(KUSTOMIZATION.read_text(encoding="utf-8"))
    (file,) = example["resources"]
    main = documents((FOLDER / file).read_text(encoding="utf-8"))[1]
    (patch,) = example["patches"]
    assert patch["target"] == {"kind": main["kind"]}
    for change in yaml.safe_load(patch["patch"]):
        section, name = find_section(main, change["path"])
        assert change["op"] == "add"
        if isinstance(section, list):
            assert name == "-"
            section.append(change["value"])
        else:
            assert name not in section, "add would replace what the manifest has"
            section[name] = change["value"]
    head, learner, rollout, _, _ = pods(main)
    assert (head["nodeSelector"], learner["nodeSelector"]) == ({"pool": "cpu"}, {"pool": "gpu"})
    assert rollout["tolerations"][-1] == {"key": "spot", "operator": "Exists"} and len(rollout["tolerations"]) == 2
    assert schema_errors(main) == []


def test_the_option_for_patches_names_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy.main(["render", "--config", "configs/tiny/policy.yaml", "--patch", "p.yaml"]) == 2
    assert "kustomiz" in capsys.readouterr().err


def test_a_config_that_no_pod_has_is_refused() -> None:
    with pytest.raises(UserError, match="no pod has this file"):
        render(policy(), config_path=str(ROOT / "configs" / "tiny" / "policy.yaml"))
    assert "/mnt/t2g/own.yaml" in render(policy(), config_path="/mnt/t2g/own.yaml")["spec"]["entrypoint"]


def test_an_image_of_your_own_is_every_pods() -> None:
    text = render_manifests(policy(), config_path="c.yaml", target="rayjob", cpu=True, image="registry/t2g:7")
    assert set(re.findall(r"image: (\S+)", text)) == {"registry/t2g:7"}
    assert "--image registry/t2g:7" in text.splitlines()[0]


@pytest.mark.parametrize("image", ["a\nb", "a: b", "t2g:1\n# x", "", "a b", "\u202et2g"])
def test_an_image_that_is_no_name_is_one_sentence(
    image: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--config", "configs/tiny/policy.yaml", "--cpu", "--image", image]
    assert deploy.main(["render", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "--image: got" in err
    assert "needs the name of an image" in err


def test_versions_are_those_of_the_project() -> None:
    pins = (ROOT / "docker" / "constraints-gpu.txt").read_text()
    assert f"\nray=={manifests.RAY_VERSION} " in pins
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (manifests.IMAGES[False], manifests.IMAGES[True]) == (f"t2g:{version}", f"t2g-cpu:{version}")


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("slf5k-policy", "slf5k-policy"),
        ("SLF5K.policy_2", "slf5k-policy-2-a92e6d"),
        ("7b", "t2g-7b-925a7b"),
        ("a" * 47, "a" * 47),
        ("a" * 48, "a" * 40 + "-97daac"),
    ],
)
def test_names(run: str, name: str) -> None:
    assert resource_name(run) == name


@pytest.mark.parametrize("run", ["null", "on", "true"])
def test_texts_of_the_user_are_texts_in_yaml(run: str) -> None:
    path = "data.path=/mnt/t2g/\U0001f642.jsonl"
    values = [f'run.name="{run}"', path]
    config = loading.load(PolicyJob, ROOT / "configs/tiny/policy.yaml", values, environ={}, cwd=ROOT)
    text = render_manifests(config, config_path="configs/tiny/policy.yaml", target="rayjob", cpu=True, overrides=[path])
    names = [document["metadata"]["name"] for document in yaml.safe_load_all(text)]
    assert names == [run] * 3
    assert path in documents(text)[1]["spec"]["entrypoint"]


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,46}", fullmatch=True))
def test_every_run_name_becomes_a_valid_kubernetes_name(run: str) -> None:
    name = resource_name(run)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 47


Labels = dict[str, str]


def admitted(policy: dict[str, Any], source: Labels, target: Labels, port: int, *, same_namespace: bool = True) -> bool:
    """What Kubernetes makes of an ingress policy, as far as ours uses its language."""

    def selects(selector: dict[str, Any], labels: Labels) -> bool:
        assert selector.keys() == {"matchLabels"}
        return selector["matchLabels"].items() <= labels.items()

    spec = policy["spec"]
    if not selects(spec["podSelector"], target):
        return True  # no policy speaks of it
    for rule in spec["ingress"]:
        if "ports" in rule and {"protocol": "TCP", "port": port} not in rule["ports"]:
            continue
        for peer in rule["from"]:
            is_near = same_namespace or peer.get("namespaceSelector") == {}
            if is_near and selects(peer["podSelector"], source):
                return True
    return False


@by_file
def test_the_network_admits_this_clusters_pods_and_the_operator_to_the_dashboard(file: Path) -> None:
    network, main = documents(file.read_text(encoding="utf-8"))
    assert (network["apiVersion"], network["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert network["spec"]["policyTypes"] == ["Ingress"]
    assert network["metadata"] == main["metadata"]
    cluster = cluster_spec(main)
    templates = [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
    templates += [main["spec"]["submitterPodTemplate"]] if main["kind"] == "RayJob" else []
    labels = [template["metadata"]["labels"] for template in templates]
    operator = {"app.kubernetes.io/component": "kuberay-operator"}
    strangers: list[Labels] = [{}, {"t2g/cluster": "another"}, {"ray.io/node-type": "worker"}, operator]
    for target in labels:
        assert all(admitted(network, source, target, port) for source in labels for port in (6379, 8265, 29500))
        assert not any(admitted(network, stranger, target, 29500) for stranger in strangers)
        assert not admitted(network, target, target, 29500, same_namespace=False)
        assert admitted(network, operator, target, 8265, same_namespace=False)


def test_no_aliases_and_three_documents() -> None:
    text = (FOLDER / "rayjob.yaml").read_text(encoding="utf-8")
    assert "&id" not in text
    assert [document["kind"] for document in yaml.safe_load_all(text)] == [
        "NetworkPolicy", "PodDisruptionBudget", "RayJob",
    ]  # fmt: skip
