//! Logs on standard error.
//!
//! A thread of its own writes the lines, so nothing else waits for a reader of standard error that stands still. Meanwhile
//! [`WAITING_LINES`] lines are kept, and the log says how many more were lost.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{IsTerminal as _, Stderr, Write};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use clap::{ArgAction, Args, ValueEnum};
use larder_net::blocking::no_thread;
use larder_net::trace::{Exporter, TARGET};
use tracing::Level;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, registry, reload};

use crate::failure::{self, Usage};

/// Options of logging.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging (on standard error)")]
pub(crate) struct LogOptions {
    /// Log more: -v progress, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    /// Filter of log lines, such as `info` or `larder_node=debug,warn`; it overrides -v and the variable LARDER_LOG
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,

    /// Format of log lines
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

impl LogOptions {
    /// Starts logging. `default_filter` counts if nothing else sets a filter. Spans go to `exporter` alone. Dropping the result
    /// writes the last lines, unless nobody reads them.
    pub(crate) fn start(
        &self,
        default_filter: &str,
        exporter: Option<&Exporter>,
    ) -> anyhow::Result<LastLines> {
        let from_environment = std::env::var("LARDER_LOG").ok();
        let is_chosen = self.log.is_some() || self.verbose > 0 || from_environment.is_some();
        let filter = env_filter(&self.filter(from_environment, default_filter))?;
        let (filter, handle) = reload::Layer::new(filter);
        let lost = Arc::<OnceLock<ErrorCounter>>::default();
        let lines = Lines { to: std::io::stderr(), lost: Arc::clone(&lost), told: 0 };
        let writer =
            NonBlockingBuilder::default().buffered_lines_limit(WAITING_LINES).thread_name("larder-log");
        // The log panics if the system gives it no thread.
        _ = thread::Builder::new().spawn(|| ()).map_err(no_thread)?.join();
        let (writer, last_lines) = writer.finish(lines);
        _ = lost.set(writer.error_counter());
        let log = tracing_subscriber::fmt::layer().with_writer(writer);
        let log = match self.log_format {
            LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal()).boxed(),
            LogFormat::Json => log.json().boxed(),
        };
        let subscriber = registry().with(log.with_filter(filter));
        // A second start in one process (a test that runs two commands) keeps the first one's settings.
        let _ = match exporter {
            Some(exporter) => subscriber.with(exporter.layer()).try_init(),
            None => subscriber.try_init(),
        };
        _ = RUNNING.set(Running { filter: handle, is_chosen });
        Ok(LastLines(Some(last_lines)))
    }

    /// Logs the error with which a command ends, and returns its status, if log lines are JSON: then all of standard error is. Gives
    /// the error back if log lines are text, or errors are not logged.
    pub(crate) fn log_failure(&self, error: anyhow::Error) -> anyhow::Result<ExitCode> {
        if self.log_format == LogFormat::Text || !tracing::event_enabled!(Level::ERROR) {
            return Err(error);
        }
        tracing::error!("{}", failure::text(&error));
        Ok(failure::exit_code(&error))
    }

    fn filter(&self, from_environment: Option<String>, default_level: &str) -> String {
        let by_count = match self.verbose {
            0 => None,
            1 => Some("info".to_owned()),
            2 => Some("debug".to_owned()),
            _ => Some("trace".to_owned()),
        };
        let filter = self.log.clone().or(by_count).or(from_environment);
        filter.unwrap_or_else(|| default_level.to_owned())
    }
}

/// Logs panics as errors from now on, so that a reader of standard error that stands still holds up no thread that panics.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let backtrace = Backtrace::capture();
        let backtrace = (backtrace.status() == BacktraceStatus::Captured).then_some(backtrace);
        tracing::error!(
            target: PANIC,
            thread = thread.name(),
            backtrace = backtrace.as_ref().map(tracing::field::display),
            "{}",
            panic.to_string().replace('\n', " ")
        );
    }));
}

/// Writes the last lines when it is dropped, unless nobody reads them.
#[must_use]
pub(crate) struct LastLines(Option<WorkerGuard>);

impl Drop for LastLines {
    fn drop(&mut self) {
        let guard = self.0.take();
        let (done, over) = mpsc::channel();
        // If the lines that wait find no room, the guard prints to standard output, whose reader may stand still too.
        let dropping = thread::Builder::new().name("larder-log-end".into()).spawn(move || {
            drop(guard);
            done.send(())
        });
        if dropping.is_ok() {
            _ = over.recv_timeout(LAST_LINES_WITHIN);
        }
    }
}

/// Standard error, with a note wherever lines were lost.
struct Lines {
    to: Stderr,
    lost: Arc<OnceLock<ErrorCounter>>,
    /// The lost lines that the log has reported.
    told: usize,
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let lost = self.lost.get().map_or(0, ErrorCounter::dropped_lines);
        if lost > self.told {
            writeln!(self.to, "{} lines of this log are lost: its reader is too slow", lost - self.told)?;
            self.told = lost;
        }
        self.to.write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// The target of panics.
const PANIC: &str = "panic";

/// How long the end of a process waits for the last lines: longer than the guard waits for a reader.
const LAST_LINES_WITHIN: Duration = Duration::from_secs(2);

/// Lines that wait to be written.
const WAITING_LINES: usize = 8_192;

/// The log of this process, once it runs.
static RUNNING: OnceLock<Running> = OnceLock::new();

struct Running {
    filter: reload::Handle<EnvFilter, Registry>,
    /// Whether the command line or the environment chose the filter.
    is_chosen: bool,
}

/// Logs by another filter from now on, unless the command line or the environment chose the filter.
///
/// # Errors
/// The text is no filter, or nothing is logged.
pub(crate) fn set_filter(filter: &str) -> anyhow::Result<()> {
    let new = env_filter(filter)?;
    let running = RUNNING.get().context("nothing is logged")?;
    if running.is_chosen {
        tracing::warn!("--log, -v or LARDER_LOG has set the log filter, and overrides the configuration's");
        return Ok(());
    }
    Ok(running.filter.reload(new)?)
}

/// Checks a filter without using it.
///
/// # Errors
/// The text is no filter.
pub(crate) fn check_filter(filter: &str) -> anyhow::Result<()> {
    env_filter(filter).map(|_| ())
}

/// Parses a filter. The HTTP server logs each invalid request, and strangers can send any number, so it stays silent unless
/// `filter` names it. Panics are logged by every filter.
fn env_filter(filter: &str) -> anyhow::Result<EnvFilter> {
    // A misspelled level would be a target that nothing logs to.
    let is_plain = |word: &&str| !word.is_empty() && !word.contains(['=', '[']);
    if let Some(word) =
        filter.split(',').map(str::trim).filter(is_plain).find(|word| word.parse::<LevelFilter>().is_err())
    {
        return Err(Usage(format!(
            "the log filter has `{word}`, which is no level: write off, error, warn, info, debug or trace, or TARGET=LEVEL"
        ))
        .into());
    }
    EnvFilter::try_new(format!("actix_http=off,{filter},{TARGET}=off,{PANIC}=error"))
        .with_context(|| Usage(format!("`{filter}` is no log filter: try `info` or `larder_node=debug`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_goes_before_the_count_and_that_before_the_environment() {
        let filter = |log: Option<&str>, verbose| {
            let options = LogOptions { verbose, log: log.map(Into::into), log_format: LogFormat::Text };
            options.filter(Some("error".into()), "warn")
        };
        assert_eq!(filter(Some("off"), 2), "off");
        assert_eq!(filter(None, 2), "debug");
        assert_eq!(filter(None, 0), "error");
    }

    #[test]
    fn a_word_that_is_no_level_is_refused_and_targets_need_a_level() {
        for filter in ["info", "OFF", "larder_node=debug,warn", "3", "[span]=info", "warn,larder_core=trace"]
        {
            check_filter(filter).unwrap();
        }
        for filter in ["inof", "warn,larder_node", "larder_node=inof"] {
            assert!(check_filter(filter).is_err(), "{filter}");
        }
    }

    #[test]
    fn a_panic_is_an_error_in_the_log_whatever_the_filter() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let file = log.reopen().unwrap();
        let log_lines = tracing_subscriber::fmt().with_writer(std::sync::Mutex::new(file));
        let subscriber = log_lines.with_env_filter(env_filter("larder_node=debug").unwrap()).finish();
        tracing::subscriber::with_default(subscriber, || {
            log_panics();
            let worked = std::panic::catch_unwind(|| panic!("seven of {}", 8));
            _ = std::panic::take_hook();
            worked.unwrap_err();
        });
        let text = std::fs::read_to_string(log.path()).unwrap();
        assert!(text.contains("ERROR") && text.contains("seven of 8"), "{text}");
        assert!(text.contains("panicked at client/cli/src/logging.rs:"), "{text}");
    }
}
