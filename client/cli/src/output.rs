//! Results on standard output.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::failure::Usage;

/// Prints a text and ends its line. A reader that has gone away (`larder ... | head`) is no error.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    closed_pipe_is_fine(writeln!(stdout, "{}", text.trim_end_matches('\n')).and_then(|()| stdout.flush()))
}

/// Prints a help or the version. A reader that has gone away is no error.
pub(crate) fn print_help(help: &clap::Error) -> io::Result<()> {
    closed_pipe_is_fine(help.print().and_then(|()| io::stdout().flush()))
}

/// Prints a line to standard error. A reader that has gone away does not end the command, as `eprintln!` would by a panic.
pub(crate) fn note(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes to the line of progress on a terminal, which may be closed.
pub(crate) fn progress(text: fmt::Arguments<'_>) {
    let mut stderr = io::stderr();
    let _ = write!(stderr, "{text}").and_then(|()| stderr.flush());
}

/// Checks before long work that the file for its result, which `option` names, can be written. Leaves an existing file as it is.
pub(crate) fn check_writable(path: &Path, option: &str) -> anyhow::Result<()> {
    let wrong = || Usage(format!("cannot write {}; name another file with {option}", path.display()));
    OpenOptions::new().create(true).append(true).open(path).map(drop).with_context(wrong)
}

/// Prints one line of many, and returns whether the reader is still there.
pub(crate) fn print_line(text: &str) -> io::Result<bool> {
    write_line(&mut io::stdout().lock(), text)
}

fn write_line(to: &mut impl io::Write, text: &str) -> io::Result<bool> {
    match writeln!(to, "{text}").and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true),
    }
}

/// As [`print_json`], for servers: a reader of standard output that stands still holds the server up for a moment only.
pub(crate) fn print_json_aside(value: &impl Serialize) -> io::Result<()> {
    let text = Arc::new(serde_json::to_string(value)?);
    let (done, printed) = mpsc::sync_channel(1);
    let of_thread = Arc::clone(&text);
    match thread::Builder::new().name("larder-stdout".into()).spawn(move || done.send(print(&of_thread))) {
        Ok(_) => printed.recv_timeout(READER_PATIENCE).unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())),
        Err(_) => print(&text),
    }
}

/// Prints one JSON value on one line.
pub(crate) fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&serde_json::to_string(value)?)
}

/// A table with these headings, none if all are empty. It has borders on a terminal only.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(if io::stdout().is_terminal() { presets::UTF8_BORDERS_ONLY } else { presets::NOTHING });
    if headings.iter().any(|heading| !heading.is_empty()) {
        table.set_header(headings);
    }
    table
}

/// Puts the numbers of a column under each other.
pub(crate) fn align_right(table: &mut Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Bytes in the units that people read.
pub(crate) fn bytes(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

/// A number in groups of three digits.
pub(crate) fn count(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

/// A part of a whole. Only the whole is 100 %, and only nothing is 0 %.
pub(crate) fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    match share {
        share if share < 1.0 && percent >= 99.95 => "99.9 %".to_owned(),
        share if share > 0.0 && percent < 0.05 => "0.1 %".to_owned(),
        _ => format!("{percent:.1} %"),
    }
}

/// A time in the unit that people read.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds as u64 {
        0..=9 => format!("{seconds:.1} s"),
        s @ 10..=119 => format!("{s} s"),
        s @ 120..=7_199 => format!("{} min", s / 60),
        s @ 7_200..=172_799 => format!("{} h", s / 3_600),
        s => format!("{} d", s / 86_400),
    }
}

/// `1 node`, `2 nodes`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(number as u64), if number == 1 { "" } else { "s" })
}

/// How long a server waits for the reader of its standard output.
const READER_PATIENCE: Duration = Duration::from_secs(1);

fn closed_pipe_is_fine(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| match error.kind() {
        ErrorKind::BrokenPipe => Ok(()),
        kind => Err(io::Error::new(kind, format!("cannot write to standard output: {error}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_is_shown_as_100_percent_and_only_nothing_as_0() {
        let shown = [0.0, 0.000_1, 0.25, 0.999_9, 1.0].map(percent);
        assert_eq!(shown, ["0.0 %", "0.1 %", "25.0 %", "99.9 %", "100.0 %"]);
    }

    #[test]
    fn times_are_shown_in_one_unit() {
        let shown = [0.04, 12.7, 200.0, 7_200.0, 200_000.0].map(duration);
        assert_eq!(shown, ["0.0 s", "12 s", "3 min", "2 h", "2 d"]);
    }

    #[test]
    fn writing_a_line_reports_that_the_reader_has_gone() {
        let (reader, mut writer) = io::pipe().unwrap();
        assert!(write_line(&mut writer, "one").unwrap());
        drop(reader);
        assert!(!write_line(&mut writer, "two").unwrap());
    }

    #[test]
    fn only_a_closed_pipe_is_fine() {
        assert!(closed_pipe_is_fine(Err(ErrorKind::BrokenPipe.into())).is_ok());
        assert!(closed_pipe_is_fine(Err(ErrorKind::StorageFull.into())).is_err());
    }
}
