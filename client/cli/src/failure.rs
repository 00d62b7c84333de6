//! The exit status of a command that fails.

use std::process::ExitCode;

/// The run itself failed: a wrong byte, a failed request, a process that died.
pub(crate) const FAILED: u8 = 1;

/// Wrong arguments, configuration or input files. The same status as clap's own.
pub(crate) const USAGE: u8 = 2;

/// A node has drained, and its supervisor should start it again (`EX_TEMPFAIL` of sysexits.h).
pub(crate) const TO_RESTART: u8 = 75;

/// Marks an error as the user's, so that the exit status is [`USAGE`]: put it into the chain as a context.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// The status for the shell.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(exit_status(error))
}

/// The error and its causes. An error that names its cause is not followed by this cause again.
pub(crate) fn text(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.contains(&cause) {
        true => text,
        false if text.is_empty() => cause,
        false => text + ": " + &cause,
    })
}

fn exit_status(error: &anyhow::Error) -> u8 {
    if error.downcast_ref::<Usage>().is_some() { USAGE } else { FAILED }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn the_status_says_whose_fault_it_is_however_deep_the_mark_is() {
        let fails = || Err::<(), _>(anyhow!("line 3: no"));
        let marked = fails().context(Usage("cannot read x".into())).context("replay").unwrap_err();
        assert_eq!(exit_status(&marked), USAGE);
        assert_eq!(format!("{marked:#}"), "replay: cannot read x: line 3: no");
        assert_eq!(exit_status(&fails().unwrap_err()), FAILED);
    }

    #[test]
    fn a_cause_that_its_error_names_is_not_said_again() {
        let causes = |first: &str| anyhow!("no such file").context(first.to_owned()).context("replay");
        assert_eq!(text(&causes("cannot read x: no such file")), "replay: cannot read x: no such file");
        assert_eq!(text(&causes("no such file. Is it here?")), "replay: no such file. Is it here?");
        assert_eq!(text(&causes("cannot read x")), "replay: cannot read x: no such file");
    }
}
