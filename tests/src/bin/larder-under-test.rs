//! The `larder` command, built for the tests that run it.

use std::process::ExitCode;

fn main() -> ExitCode {
    larder_cli::run(std::env::args_os())
}
