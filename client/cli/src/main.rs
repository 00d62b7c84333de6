//! The `larder` command.

use std::process::ExitCode;

#[global_allocator]
static HEAP: larder_cli::Heap = larder_cli::Heap;

fn main() -> ExitCode {
    larder_cli::run(std::env::args_os())
}
