//! Ties a server's life to that of the process that started it.

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Has the kernel kill this process when the thread that started it ends. `parent` is this thread's process.
///
/// # Errors
/// The parent is gone already.
pub(crate) fn die_with(parent: u32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot arrange a signal for the death of the parent process")?;
    // The parent may have died before the line above.
    if getppid().map(Pid::as_raw_pid) != i32::try_from(parent).ok() {
        bail!("the parent process {parent} is gone");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_whose_parent_is_gone_does_not_start() {
        // Process 0 is nobody's parent here; a test process has another one.
        assert!(die_with(0).unwrap_err().to_string().contains("is gone"));
    }
}
