//! Shows the progress of a replay.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// A bar on standard error with rate, time left and the hit rate so far; nothing if standard error is no terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `requests` requests; nothing is shown if `quiet`.
    pub fn new(requests: u64, quiet: bool) -> Self {
        if quiet {
            return Self { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::with_draw_target(Some(requests), ProgressDrawTarget::stderr());
        bar.set_style(
            ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar()).with_key(
                "rate",
                |state: &ProgressState, text: &mut dyn Write| {
                    // A writer that fails shows a shorter line.
                    let _ = write!(text, "{}/s", HumanCount(state.per_sec() as u64));
                },
            ),
        );
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar }
    }

    /// Counts a request that has ended; `hit_rate` is the fraction of tokens hit until now.
    pub fn advance(&self, hit_rate: f64) {
        self.bar.inc(1);
        if !self.bar.is_hidden() {
            self.bar.set_message(format!("{:.1} %", hit_rate * 100.0));
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

const TEMPLATE: &str = "{wide_bar} {human_pos}/{human_len} requests  {rate}  {eta} left  {msg} hit";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_template_is_valid() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }

    #[test]
    fn the_bar_renders_and_goes_away() {
        for quiet in [false, true] {
            let progress = Progress::new(2, quiet);
            progress.advance(0.5);
            progress.finish();
            assert!(progress.bar.is_finished());
        }
    }
}
