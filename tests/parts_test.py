"""Tests of the runner of the tests: `python3 tests/parts_test.py`."""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))
import parts

PYTHON = [sys.executable, "-c"]
SKIP = [*PYTHON, "import os; open(os.environ['LARDER_SKIPS'], 'a').write('a_test\\tno trace\\n')"]
NOTHING_DONE = [*PYTHON, "import os; open(os.environ['LARDER_SKIPS'], 'a').write('kernels\\tno compiler\\n'); exit(77)"]
JUNIT = """<testsuites><testsuite>
<testcase name="one"/><testcase name="a_test"/>
<testcase name="two"><skipped message="no GPU"/></testcase><testcase name="three"><failure/></testcase>
<testcase name="four"><flakyFailure/></testcase>
</testsuite></testsuites>"""


class Runs(unittest.TestCase):
    def play(self, *steps):
        """The table of a run with these steps, and how the run ended."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            status = None
            try:
                with parts.Run(folder, 60) as run:
                    for step in steps:
                        step(run, Path(folder))
            except SystemExit as end:
                status = end.code
        return printed.getvalue().split("\n== results\n")[1], status

    def test_a_run_that_passes_says_so(self):
        table, status = self.play(lambda run, _: run.part("format", [*PYTHON, ""]))
        self.assertRegex(table, r"format +passed +\d+:\d\d\n1 parts passed, 0 skipped, 0 failed; 0 tests")
        self.assertEqual(status, 0)

    def test_a_part_that_fails_fails_the_run_and_others_go_on(self):
        table, status = self.play(
            lambda run, _: run.part("lints", [*PYTHON, "exit(3)"], [*PYTHON, "open('never', 'w')"]),
            lambda run, _: run.part("book", [*PYTHON, ""]),
        )
        self.assertRegex(table, r"lints +FAILED")
        self.assertRegex(table, r"book +passed")
        self.assertEqual(status, 1)
        self.assertFalse(Path("never").exists())

    def test_the_end_of_what_failed_follows_the_table(self):
        table, _ = self.play(
            lambda run, _: run.part("book", [*PYTHON, "print('all is well')"]),
            lambda run, _: run.part("lints", [*PYTHON, "import sys; [print(n) for n in range(99)]; sys.exit('unused import')"]),
        )
        end = table.split("\n\n== the end of: lints\n")[1].splitlines()
        self.assertEqual(len(end), parts.LAST_LINES)
        self.assertIn("unused import", end)
        self.assertNotIn("all is well", table)

    def test_a_command_that_is_not_there_fails(self):
        table, status = self.play(lambda run, _: run.part("spelling", ["no-such-program"]))
        self.assertRegex(table, r"spelling +FAILED")
        self.assertEqual(status, 1)

    def test_a_part_that_is_left_out_is_skipped_with_its_reason_and_fails_nothing(self):
        table, status = self.play(lambda run, _: run.skip("engines: vllm", "21 minutes into the run"))
        self.assertRegex(table, r"engines: vllm +skipped +\d+:\d\d\n +- 21 minutes into the run\n0 parts passed, 1 skipped")
        self.assertEqual(status, 0)

    def test_a_part_that_can_do_nothing_is_skipped_and_one_that_did_something_is_not(self):
        table, _ = self.play(lambda run, _: run.part("kernels", NOTHING_DONE))
        self.assertRegex(table, r"kernels +skipped +\d+:\d\d\n +- no compiler\n0 parts passed, 1 skipped")
        table, _ = self.play(lambda run, _: run.part("licences", [*PYTHON, ""], NOTHING_DONE))
        self.assertRegex(table, r"licences +passed +\d+:\d\d  1 skipped\n +- kernels: no compiler")
        table, status = self.play(lambda run, _: run.part("kernels", NOTHING_DONE, [*PYTHON, "exit(1)"]))
        self.assertRegex(table, r"kernels +FAILED")
        self.assertEqual(status, 1)

    def test_a_test_that_is_skipped_does_not_count_as_passed(self):
        def tests(run, folder):
            write = [*PYTHON, f"open({str(folder / 'junit.xml')!r}, 'w').write({JUNIT!r})"]
            run.part("tests", SKIP, SKIP, write, junit=folder / "junit.xml")

        table, _ = self.play(tests)
        self.assertRegex(table, r"tests +passed +\d+:\d\d  2 tests passed \(1 at the second try\), 1 failed, 2 skipped\n")
        self.assertIn("- four: FLAKY", table)
        self.assertIn("- a_test: no trace", table)
        self.assertIn("- two: no GPU", table)

    def test_what_an_earlier_part_left_is_not_counted_again(self):
        table, _ = self.play(lambda run, _: run.part("one", SKIP), lambda run, _: run.part("two", [*PYTHON, ""]))
        self.assertRegex(table, r"two +passed +\d+:\d\d\n2 parts passed")

    def test_the_table_is_printed_where_the_run_is_ended(self):
        def end(run, _):
            run.part("tests", [*PYTHON, "import os, signal; os.kill(os.getppid(), signal.SIGTERM); import time; time.sleep(5)"])

        table, status = self.play(lambda run, _: run.part("format", [*PYTHON, ""]), end)
        self.assertRegex(table, r"format +passed")
        self.assertRegex(table, r"tests +interrupted")
        self.assertEqual(status, "ended from outside")


if __name__ == "__main__":
    unittest.main()
