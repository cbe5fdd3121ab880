from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import Multiaddr, Port, Settings, SettingsPath, home_path, load_settings, make_settings


class Engine(Settings):
    """An inner table."""

    threads: Annotated[int, Field(ge=1, le=64, description="CPU threads")] = 2
    kind: Literal["llama", "fake"] = "llama"


class Sample(Settings):
    """A settings file."""

    name: Annotated[str, Field(min_length=1, description="any name")]
    home: SettingsPath = Path("home")
    rate: float = 1.0
    port: Port = 0
    listen: tuple[Multiaddr, ...] = ()
    engine: Engine = Engine()


def wrong(values: dict[str, object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_settings(values, Sample, source="sample.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_a_file(tmp_path):
    """TOML lists, strings and whole numbers become tuples, paths and floats; relative paths start at the file."""
    file = tmp_path / "sample.toml"
    file.write_text('name = "a"\nhome = "x/y"\nrate = 2\nlisten = ["/ip4/0.0.0.0/tcp/1"]\n[engine]\nthreads = 3\n')
    found = load_settings(file, Sample)
    assert found.home == tmp_path / "x/y"
    assert found.rate == 2.0
    assert found.listen == ("/ip4/0.0.0.0/tcp/1",)
    assert found.engine == Engine(threads=3)


def test_default_paths_start_at_the_file_too(tmp_path):
    """A path nobody set is still relative to the file, not to the working directory."""
    (tmp_path / "s.toml").write_text('name = "a"')
    assert load_settings(tmp_path / "s.toml", Sample).home == tmp_path / "home"


def test_absolute_path_stays(tmp_path):
    """An absolute path is taken as it is."""
    assert make_settings({"name": "a", "home": str(tmp_path)}, Sample, source="s", folder=Path("/z")).home == tmp_path


def test_overrides_replace_the_file(tmp_path):
    """What the command line says wins over the file."""
    (tmp_path / "s.toml").write_text('name = "a"\nport = 1')
    assert load_settings(tmp_path / "s.toml", Sample, overrides={"port": 2}).port == 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "a", "prot": 1}, "unknown key 'prot'; did you mean 'port'?"),
        ({"name": "a", "NAME": "b"}, "unknown key 'NAME'; did you mean 'name'?"),
        ({"name": "a", "zzzzzz": 1}, "unknown key 'zzzzzz'; known here: engine, home, listen, name, port, rate"),
        ({"name": "a", "engine": {"thread": 1}}, "unknown key 'engine.thread'; did you mean 'threads'?"),
        ({"name": "a", "threads": 1}, "unknown key 'threads'; it belongs to [engine]"),
        ({"name": "a", "engine": {"threads": 0}}, "engine.threads = 0: should be greater than or equal to 1 (CPU th"),
        ({"name": "a", "engine": {"threads": "2"}}, 'engine.threads = "2": should be a valid integer'),
        ({"name": "a", "engine": {"kind": "x"}}, "engine.kind = \"x\": should be 'llama' or 'fake'"),
        ({"name": "a", "port": 70_000}, "port = 70000: should be less than or equal to 65535 (a TCP port"),
        ({"name": "a", "listen": ["nowhere"]}, 'listen[0] = "nowhere": must be an address like /ip4/'),
        ({"name": "a", "rate": float("nan")}, "rate = NaN"),
        ({"name": "a", "home": 3}, "home = 3: must be a path"),
        ({"name": ""}, 'name = "": must be any name'),
        ({}, "'name' is missing (any name)"),
    ],
)
def test_names_key_value_and_what_is_allowed(values, says):
    """Each mistake is one line with the file, the key, what was given and what is allowed."""
    message = wrong(values)
    assert message.startswith("sample.toml: ")
    assert says in message


def test_several_mistakes_are_told_at_once():
    """The first three mistakes are named and the rest counted."""
    message = wrong({"name": "a", "k1": 1, "k2": 2, "k3": 3, "k4": 4, "k5": 5})
    assert "'k3'" in message
    assert "'k4'" not in message
    assert message.endswith("and 2 more")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no settings file"),
        (b"name = ", "is not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (1 << 20) + b"#", "too large"),
    ],
)
def test_unreadable_files(tmp_path, content, says):
    """A file that is missing, broken, binary or huge is refused in one line that names it."""
    file = tmp_path / "s.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_settings(file, Sample)
    assert str(file) in str(caught.value)


def test_a_folder_is_not_a_settings_file(tmp_path):
    """Naming a folder gives the system's reason, not a traceback."""
    with pytest.raises(ConfigurationError, match="cannot read the settings file"):
        load_settings(tmp_path, Sample)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a=" + b"[" * 20_000, "is not a settings file"),
        (b"a=" + b"[" * 300 + b"]" * 300, "is nested more than 16 deep"),
        (b'name = "a"\nx' + b".a" * 3000 + b" = 1", "line 2 has a key of more than 16 parts"),
        (b"[x" + b".a" * 100_000 + b"]", "line 1 has a key of more than 16 parts"),
        (b"x = {'a'" + b""" . "a" """ * 17 + b"= 1}", "line 1 has a key of more than 16 parts"),
        (b"\n".join(b"a" + b".b" * depth + b".c = 1" for depth in range(1, 800)), "line 15 has a key"),
        (b"x = " + b"{a = " * 20 + b"1" + b"}" * 20, "is nested more than 16 deep"),
        (b"port = 0x" + b"f" * 5000, "port is a number of thousands of digits"),
        (b"engine.threads = 0b1" + b"0" * 30_000, "engine.threads is a number of thousands of digits"),
        (b"port = " + b"1" * 5000, "is not a settings file: Exceeds the limit (4300 digits)"),
        (b"port = " + b"1" * 4000, "port = 1111"),
        (b'name = "a"\nhome = "~nosuchuser9/x"', 'home = "~nosuchuser9/x": ~nosuchuser9/x: there is no such user'),
        (b'name = "a"\nhome = "a\\u0000b"', "cannot be the name of a file"),
        (b'name = "a"\nport = 1979-05-27', 'port = "1979-05-27"'),
    ],
    ids=[
        *("nested", "nested less", "dotted key", "dotted header", "dotted and quoted", "dotted lines", "inline tables"),
        *("hexadecimal", "binary", "5000 digits", "4000 digits", "unknown user", "nul", "date"),
    ],
)
def test_what_no_settings_file_holds(tmp_path, content, says):
    """What is too deep, too long or impossible is refused in one line as well."""
    (tmp_path / "s.toml").write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(tmp_path / "s.toml", Sample)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_a_command_line_adds_is_bounded_too():
    """Values that no file held: tables 2000 deep, a number of 6000 digits, bytes that are no text."""
    deep: dict[str, object] = {}
    table = deep
    for _ in range(2000):
        table["a"] = table = {}
    assert "engine.a.a." in wrong({"name": "a", "engine": deep})
    assert "nested more than 16 deep" in wrong({"name": "a", "engine": deep})
    assert wrong({"port": 1 << 20_000}) == "sample.toml: port is a number of thousands of digits; no setting is"
    assert "not a table of settings" in wrong({"name": "\udcff"})


def test_the_usual_depth_of_keys_is_free(tmp_path):
    """Dots in values and comments are not keys, and a dotted key may go as deep as settings do."""
    (tmp_path / "s.toml").write_text('# 1. 2. 3.\nname = "a"\nengine.threads = 3\nhome = "' + "a.b/" * 40 + '"')
    assert load_settings(tmp_path / "s.toml", Sample).engine.threads == 3


def test_thousands_of_mistakes_are_counted_at_once():
    """The time is that of reading them, not its square."""
    assert wrong({"name": "a"} | {f"k{i}": i for i in range(30_000)}).endswith("and 29997 more")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_may_never_end_is_not_read(tmp_path, kind):
    """A pipe, a device and a folder are refused before a byte is read."""
    path = {"fifo": tmp_path / "fifo", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=r"device or a pipe|Is a directory"):
        load_settings(path, Sample)


def test_a_byte_order_mark_is_left_out(tmp_path):
    """Editors on Windows put one in front."""
    (tmp_path / "s.toml").write_bytes(b"\xef\xbb\xbf" + b'name = "a"')
    assert load_settings(tmp_path / "s.toml", Sample).name == "a"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("/ip4/999.1.1.1/tcp/1", "999.1.1.1 is not an IPv4 address"),
        ("/ip4/1.2.3.4/tcp/99999", "99999 is not a port from 0 to 65535"),
        ("/ip6/1.2.3.4/tcp/1", "1.2.3.4 is not an IPv6 address"),
        ("/ip4/\u0661.1.1.1/tcp/1", "is not an IPv4 address"),
        ("/ip4/1.1.1.1/tcp/\u0661", "must be an address like"),
        ("/dns/-/tcp/1", "- is not the name of a host"),
        ("/dns/" + "a" * 300 + "/tcp/1", "must be an address like"),
    ],
)
def test_an_address_no_socket_can_have(address, says):
    """Found when the settings are read, not when the socket is opened."""
    assert says in wrong({"name": "a", "listen": [address]})


def test_a_home_of_no_user():
    """`~` of somebody who is not here is one line, also on the command line."""
    assert home_path(Path("~")) == Path.home()
    with pytest.raises(ConfigurationError, match="there is no such user"):
        home_path(Path("~nosuchuser9/x"))
