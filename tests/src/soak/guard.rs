//! Ends the commands that a run starts when the run itself ends, for whatever reason.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, anyhow};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// A command that the kernel kills when the thread that started it ends. `program` runs in a process group of its own: Ctrl-C
/// goes only to the run.
///
/// # Errors
/// Fails if the system does not say where this program is.
pub(super) fn command(program: &Path) -> anyhow::Result<tokio::process::Command> {
    let mut command = tokio::process::Command::new(std::env::current_exe()?);
    command.arg(WORD).arg(std::process::id().to_string()).arg(program);
    command.process_group(0).kill_on_drop(true);
    Ok(command)
}

/// The command that this process is to become, if [`command`] started it: the parent's process id, the program, its arguments.
pub(super) fn wrapped(args: &[OsString]) -> Option<Vec<OsString>> {
    (args.get(1)? == WORD && args.len() >= 4).then(|| args[2..].to_vec())
}

/// Becomes the command. Returns only if that fails, with the reason.
pub(super) fn become_it(wrapped: &[OsString]) -> anyhow::Error {
    let tie = || -> anyhow::Result<()> {
        set_parent_process_death_signal(Some(Signal::KILL))
            .context("cannot arrange a signal for the death of the parent process")?;
        let parent = wrapped[0].to_str().and_then(|text| text.parse().ok());
        anyhow::ensure!(getppid().map(Pid::as_raw_pid) == parent, "the run that started this is gone");
        Ok(())
    };
    match tie() {
        Ok(()) => anyhow!(Command::new(&wrapped[1]).args(&wrapped[2..]).exec()),
        Err(error) => error,
    }
}

/// The first argument of a process that is to become another command.
const WORD: &str = "--become";
