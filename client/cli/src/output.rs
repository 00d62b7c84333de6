//! Results on standard output.

use std::io::{self, ErrorKind, Write as _};

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// Prints a text that ends its line. A reader that has gone away (`larder ... | head`) is no error.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    closed_pipe_is_fine(writeln!(stdout, "{}", text.trim_end_matches('\n')).and_then(|()| stdout.flush()))
}

/// Prints one JSON value on one line.
pub(crate) fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&serde_json::to_string(value)?)
}

/// A table with these headings, none if all are empty.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
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

/// `1 node`, `2 nodes`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(number as u64), if number == 1 { "" } else { "s" })
}

fn closed_pipe_is_fine(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closed_pipe_is_fine() {
        assert!(closed_pipe_is_fine(Err(ErrorKind::BrokenPipe.into())).is_ok());
        assert!(closed_pipe_is_fine(Err(ErrorKind::StorageFull.into())).is_err());
    }
}
