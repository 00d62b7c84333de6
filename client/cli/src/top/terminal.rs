//! The terminal while something is drawn on it again and again.

use std::io::{self, Read as _, Write as _};
use std::thread;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

/// A screen of its own; dropping it brings back what was there.
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

/// The keys that are pressed from now on, until standard input ends.
pub(crate) fn keys() -> mpsc::Receiver<u8> {
    let (sender, receiver) = mpsc::channel(MAX_KEYS);
    // It reads until the process ends.
    thread::spawn(move || {
        for key in io::stdin().lock().bytes() {
            match key {
                Ok(key) if sender.blocking_send(key).is_ok() => {}
                _ => return,
            }
        }
    });
    receiver
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

/// Keys that wait to be read.
const MAX_KEYS: usize = 64;
