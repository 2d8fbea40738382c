"""Tests for run folders: whole files, one run a folder, differences shown."""

import json
import math
import os
import subprocess
import sys
import textwrap

import pytest

from simulation import run_folder

CONFIG = {"flags": {"clip": 0.1, "bits": 16}, "seed": 3}


def open_once(path, config=CONFIG) -> run_folder.RunFolder:
    with run_folder.open_run_folder(path, config) as folder:
        return folder


def test_json_has_only_what_json_knows(tmp_path):
    value = {"epsilon": math.inf, "low": [-math.inf, math.nan], "order": 2.5}

    def refuse(name: str) -> None:
        raise AssertionError(name)

    run_folder.write_json(tmp_path / "file.json", value)
    text = (tmp_path / "file.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert found == {"epsilon": "inf", "low": ["-inf", None], "order": 2.5}


class TestOpening:
    def test_configuration_is_written_first(self, tmp_path):
        path = tmp_path / "a" / "b"
        with run_folder.open_run_folder(path, CONFIG) as folder:
            assert json.loads((path / "config.json").read_text()) == CONFIG
            assert not folder.resumed

    def test_same_configuration_takes_the_run_up(self, tmp_path):
        open_once(tmp_path / "run")
        assert open_once(tmp_path / "run").resumed

    def test_other_configuration_is_refused_with_every_difference(self, tmp_path):
        open_once(tmp_path / "run")
        other = {"flags": {"clip": 0.2, "bits": 16, "beta": 0.0}, "seed": None}
        with pytest.raises(run_folder.RunFolderError) as caught:
            open_once(tmp_path / "run", other)
        lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
        assert lines == [
            "flags.clip: 0.1 -> 0.2",
            "seed: 3 -> None",
            "flags.beta: (none) -> 0.0",
        ]
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == CONFIG

    def test_a_folder_with_other_things_is_refused(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(run_folder.RunFolderError, match="not the folder of a run"):
            open_once(tmp_path)
        assert os.listdir(tmp_path) == ["thesis.tex"]

    def test_a_damaged_configuration_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text('{"flags"')
        with pytest.raises(run_folder.RunFolderError, match="cannot read"):
            open_once(tmp_path)

    def test_a_path_that_is_or_leads_through_a_file_is_refused(self, tmp_path):
        file = tmp_path / "file"
        file.write_text("")
        for path in (file, file / "run"):
            with pytest.raises(run_folder.RunFolderError):
                open_once(path)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission_is_refused(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(run_folder.RunFolderError, match="cannot write"):
            open_once(tmp_path / "run")

    def test_errors_of_the_run_itself_pass_unchanged(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="mine"):
            with run_folder.open_run_folder(tmp_path / "run", CONFIG):
                raise FileNotFoundError("mine")


class TestHolding:
    PROGRAM = textwrap.dedent("""
        import pathlib, sys
        from simulation import run_folder
        try:
            with run_folder.open_run_folder(pathlib.Path(sys.argv[1]), {"a": 1}):
                print("held")
        except run_folder.RunFolderError as error:
            print(error)
    """)

    def run_program(self, path) -> str:
        command = [sys.executable, "-c", self.PROGRAM, str(path)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout

    def test_another_process_is_kept_out_until_the_end(self, tmp_path):
        path = tmp_path / "run"
        with run_folder.open_run_folder(path, {"a": 1}):
            assert "another process is running" in self.run_program(path)
        assert self.run_program(path) == "held\n"


class TestWriting:
    def test_content_replaces_content(self, tmp_path):
        for text in ("one", "two"):
            run_folder.write_text(tmp_path / "file", text, durable=True)
        assert (tmp_path / "file").read_text() == "two"
        assert os.listdir(tmp_path) == ["file"]

    def test_a_failure_leaves_the_old_content_and_no_part(self, tmp_path):
        run_folder.write_text(tmp_path / "file", "old")
        with pytest.raises(UnicodeEncodeError):
            run_folder.write_text(tmp_path / "file", "new \udc80")
        assert (tmp_path / "file").read_text() == "old"
        assert os.listdir(tmp_path) == ["file"]

    def test_parts_of_a_killed_process_are_removed(self, tmp_path):
        open_once(tmp_path)
        (tmp_path / "metrics.csv.1234.partial").write_text("half")
        open_once(tmp_path)
        assert not list(tmp_path.glob("*.partial"))
