//! The program behind `tests/soak`.

use std::process::ExitCode;

fn main() -> ExitCode {
    larder_tests::soak::run(std::env::args_os())
}
