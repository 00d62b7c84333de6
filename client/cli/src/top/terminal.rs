//! The terminal while something is drawn on it again and again.

use std::io::{self, Read as _, Write as _};
use std::thread;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

/// A screen of its own; dropping it restores the terminal.
pub(crate) struct Screen {
    before: Termios,
}

impl Screen {
    /// Takes the terminal: keys come one by one, and are not shown.
    ///
    /// # Errors
    /// Standard input or output is no terminal.
    pub(crate) fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut drawing = before.clone();
        drawing.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(io::stdin(), OptionalActions::Now, &drawing)?;
        let screen = Self { before };
        write(ENTER)?;
        Ok(screen)
    }

    /// Columns and rows.
    pub(crate) fn size(&self) -> (usize, usize) {
        let size = tcgetwinsize(io::stdout());
        let known = size.ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
        known.map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()))
    }

    /// Shows a text in the place of the one before.
    ///
    /// # Errors
    /// The terminal has gone.
    pub(crate) fn draw(&self, text: &str) -> io::Result<()> {
        write(&(format!("{HOME}{}{CLEAR_BELOW}", text.replace('\n', &format!("{CLEAR_LINE}\r\n")))))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Errors: the terminal has gone, and there is nothing to bring back.
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The action of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Quit,
    Sort,
    Reverse,
    /// Scrolls by rows; down if positive.
    Scroll(isize),
    /// Scrolls by columns; right if positive.
    Pan(isize),
}

/// The keys that are pressed from now on, until standard input ends.
pub(crate) fn keys() -> mpsc::Receiver<Key> {
    let (sender, receiver) = mpsc::channel(MAX_KEYS);
    // The thread reads until the process ends.
    thread::spawn(move || {
        let mut sequence = Vec::new();
        for byte in io::stdin().lock().bytes() {
            let Ok(byte) = byte else { return };
            let key = read_key(&mut sequence, byte);
            if key.is_some_and(|key| sender.blocking_send(key).is_err()) {
                return;
            }
        }
    });
    receiver
}

/// The key that this byte completes. A terminal sends three or four bytes for an arrow or a page key: ESC, `[`, and the key's
/// own.
fn read_key(sequence: &mut Vec<u8>, byte: u8) -> Option<Key> {
    sequence.push(byte);
    let key = match &sequence[..] {
        [ESC] | [ESC, b'['] | [ESC, b'[', b'0'..=b'9'] => return None,
        [b'q' | b'Q'] => Some(Key::Quit),
        [b's'] => Some(Key::Sort),
        [b'r'] => Some(Key::Reverse),
        [b'j'] | [ESC, b'[', b'B'] => Some(Key::Scroll(1)),
        [b'k'] | [ESC, b'[', b'A'] => Some(Key::Scroll(-1)),
        [b' '] | [ESC, b'[', b'6', b'~'] => Some(Key::Scroll(PAGE_ROWS)),
        [b'b'] | [ESC, b'[', b'5', b'~'] => Some(Key::Scroll(-PAGE_ROWS)),
        [b'l'] | [ESC, b'[', b'C'] => Some(Key::Pan(1)),
        [b'h'] | [ESC, b'[', b'D'] => Some(Key::Pan(-1)),
        _ => None,
    };
    sequence.clear();
    key
}

fn write(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Another screen, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[K\x1b[J";

/// The byte that begins a terminal's key sequence.
const ESC: u8 = 0x1b;

/// Rows that a page key moves.
const PAGE_ROWS: isize = 10;

/// Keys that wait to be read.
const MAX_KEYS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_and_letters_are_keys_and_anything_else_is_left_out() {
        let mut sequence = Vec::new();
        let typed = b"q\x1b[B\x1b[5~xl\x1b[Z\x1bxk";
        let keys: Vec<Key> = typed.iter().filter_map(|&byte| read_key(&mut sequence, byte)).collect();
        assert_eq!(keys, [Key::Quit, Key::Scroll(1), Key::Scroll(-10), Key::Pan(1), Key::Scroll(-1)]);
        assert!(sequence.is_empty());
    }
}
