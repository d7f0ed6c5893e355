"""Key files: never overwritten, strictly parsed, never printed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys

import msgspec
import pytest
import zmq

from canary_obs.config import CanaryConfig, ServiceConfig, masked
from canary_obs.errors import ConfigurationError
from canary_obs.transport.keys import MAX_FILE_BYTES, KeyKind, engine_keys, make_keys, service_keys


@pytest.fixture
def key_files(tmp_path):
    return make_keys(tmp_path / "keys")


@pytest.fixture
def engine(key_files):
    return CanaryConfig(
        engine_secret_key_file=str(key_files[KeyKind.ENGINE_SECRET]),
        service_public_key_file=str(key_files[KeyKind.SERVICE_PUBLIC]),
    )


@pytest.fixture
def service(key_files):
    return ServiceConfig(
        service_secret_key_file=str(key_files[KeyKind.SERVICE_SECRET]),
        engine_public_keys_file=str(key_files[KeyKind.ENGINE_PUBLIC]),
    )


def key_in(path):
    return path.read_text().split()[1]


def test_two_key_pairs_are_created_and_each_side_reads_its_own(key_files, engine, service):
    of_engine, of_service = engine_keys(engine), service_keys(service)
    assert zmq.curve_public(of_engine.secret) == of_engine.public
    assert of_service.engines.admits(of_engine.public)
    assert not of_service.engines.admits(of_engine.service)
    assert zmq.curve_public(of_service.secret) == of_engine.service
    assert len({key_in(path) for path in key_files.values()}) == 4
    assert [path.name for path in key_files.values()] == [
        "service.secret",
        "service.public",
        "engine.secret",
        "engine.public",
    ]


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_the_owner_may_read_secret_keys_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        key_files = make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    modes = {kind: stat.S_IMODE(path.stat().st_mode) for kind, path in key_files.items()}
    assert modes == {kind: 0o600 if kind.secret else 0o644 for kind in KeyKind}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_existing_keys_are_never_overwritten_and_no_new_file_is_left(tmp_path):
    (tmp_path / "engine.secret").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"engine\.secret cannot be created: File exists") as caught:
        make_keys(tmp_path)
    assert caught.value.value == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["engine.secret"]
    assert (tmp_path / "engine.secret").read_text() == "precious"


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigurationError, match="cannot be created"):
            make_keys(folder)


def test_without_key_files_there_are_no_keys():
    assert engine_keys(CanaryConfig()) is None
    assert service_keys(ServiceConfig()) is None


@pytest.mark.parametrize("name", ["engine_secret_key_file", "service_public_key_file"])
def test_one_key_file_of_an_engine_is_refused(engine, name):
    incomplete = msgspec.structs.replace(engine, **{name: ""})
    with pytest.raises(ConfigurationError, match="requires " + name) as caught:
        engine_keys(incomplete)
    assert "KV_CANARY_" + name.upper() in caught.value.remedy


@pytest.mark.parametrize("name", ["service_secret_key_file", "engine_public_keys_file"])
def test_one_key_file_of_a_service_is_refused(service, name):
    incomplete = msgspec.structs.replace(service, **{name: ""})
    with pytest.raises(ConfigurationError, match="requires " + name) as caught:
        service_keys(incomplete)
    assert "KV_CANARY_" + name.upper() in caught.value.remedy


def test_one_file_lists_several_engines_with_comments(key_files, service, tmp_path):
    other = key_in(make_keys(tmp_path / "other")[KeyKind.ENGINE_PUBLIC])
    path = key_files[KeyKind.ENGINE_PUBLIC]
    first = key_in(path)
    path.write_text(f"# rack 1\n\n{path.read_text()}  engine-public {other} gpu-host-2, since May\n")
    engines = service_keys(service).engines
    assert all(engines.admits(key.encode()) for key in (first, other))


def refused(config, name, rule, secrets=()):
    path = getattr(config, name)
    with pytest.raises(ConfigurationError, match=rule) as caught:
        (engine_keys if isinstance(config, CanaryConfig) else service_keys)(config)
    assert (caught.value.setting, caught.value.value) == (name, path)
    assert caught.value.remedy
    assert not [secret for secret in secrets if secret in str(caught.value)]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda line: "", "holds no engine-secret key"),
        (lambda line: "# " + line, "holds no engine-secret key"),
        (lambda line: line + line, "holds 2 keys"),
        (lambda line: "x" + line.split()[1], "line 1 must be `engine-secret KEY`$"),
        (
            lambda line: "\n" + line.replace("engine-", "service-"),
            "line 2 must be `engine-secret KEY`, not of kind service-secret",
        ),
        (lambda line: "engine-secret", "line 1 does not have 40 characters"),
        (lambda line: line[:40], "line 1 does not have 40 characters"),
        (lambda line: line.replace(line.split()[1], line.split()[1] + "0"), "does not have 40 characters"),
        (lambda line: "engine-secret " + line.split()[1][:35] + "#####", "does not have 40 characters"),
        (lambda line: "engine-secret " + line.split()[1][:39] + "~", "does not have 40 characters"),
        (lambda line: "engine-secret " + line.split()[1][:39] + "ü", "does not have 40 characters"),
        (lambda line: "#" * (MAX_FILE_BYTES + 1), f"is larger than {MAX_FILE_BYTES} bytes"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_without_its_content(key_files, engine, change, rule):
    path = key_files[KeyKind.ENGINE_SECRET]
    key = key_in(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigurationError) as caught:
        engine_keys(engine)
    assert (caught.value.setting, caught.value.value) == ("engine_secret_key_file", str(path))
    assert re.search(rule, caught.value.rule)
    assert key[:35] not in str(caught.value)


def test_a_secret_key_among_public_ones_is_refused_and_not_printed(key_files, service):
    secret = key_files[KeyKind.ENGINE_SECRET]
    wrong = msgspec.structs.replace(service, engine_public_keys_file=str(secret))
    refused(wrong, "engine_public_keys_file", "not of kind engine-secret", [key_in(secret)])


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666])
def test_a_secret_key_that_others_may_read_or_write_is_refused(key_files, engine, service, mode):
    for config, name in ((engine, "engine_secret_key_file"), (service, "service_secret_key_file")):
        os.chmod(getattr(config, name), mode)
        refused(config, name, f"has mode 0{mode:o}")


def test_a_pods_group_may_read_a_secret_key(key_files, engine):
    key_files[KeyKind.ENGINE_SECRET].chmod(0o440)
    assert engine_keys(engine) is not None


def test_a_world_writable_key_list_is_refused(key_files, service):
    key_files[KeyKind.ENGINE_PUBLIC].chmod(0o646)
    refused(service, "engine_public_keys_file", "everyone may add keys to it")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none", "No such file"),
        ("folder", "is not a file"),
        ("pipe", "is not a file"),
        ("file/below", "Not a directory"),
    ],
)
def test_an_unreadable_file_is_refused_without_blocking(tmp_path, engine, name, rule):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    refused(
        msgspec.structs.replace(engine, engine_secret_key_file=str(tmp_path / name)),
        "engine_secret_key_file",
        rule,
    )


def test_no_secret_key_is_printed(key_files, engine, service):
    secrets = [key_in(path) for kind, path in key_files.items() if kind.secret]
    printed = f"{masked(engine)} {masked(service)} {engine_keys(engine)} {service_keys(service)!r}"
    assert not [secret for secret in secrets if secret in printed]
    assert engine.engine_secret_key_file in printed


def test_the_command_creates_keys_prints_only_paths_and_never_overwrites(tmp_path):
    command = [sys.executable, "-m", "canary_obs", "keys", str(tmp_path / "keys")]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=False) for _ in range(2)
    )
    assert (first.returncode, first.stderr) == (0, "")
    paths = sorted((tmp_path / "keys").iterdir())
    assert sorted(line.split()[0] for line in first.stdout.splitlines()) == [str(path) for path in paths]
    named = {line.split()[-1].removeprefix("KV_CANARY_").lower() for line in first.stdout.splitlines()}
    assert named <= {*CanaryConfig.__struct_fields__, *ServiceConfig.__struct_fields__}
    assert len(named) == 4
    assert not [path for path in paths if key_in(path) in first.stdout]
    assert second.returncode == 2
    assert "File exists" in second.stderr
