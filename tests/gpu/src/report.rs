//! The results, as a table or as JSON.

use std::io::Write as _;

use serde::Serialize;

/// All results.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The GPU's name.
    pub(crate) device: Option<String>,
    /// Why there is nothing to check.
    pub(crate) skipped: Option<String>,
    /// The seed of the random bytes.
    pub(crate) seed: u64,
    pub(crate) checks: Vec<Check>,
    pub(crate) measures: Vec<Measure>,
    /// Checks that were not possible here, and the reasons.
    pub(crate) notes: Vec<String>,
}

/// Something that is right or wrong.
#[derive(Debug, Serialize)]
pub(crate) struct Check {
    pub(crate) what: String,
    /// The error, if any.
    pub(crate) wrong: Option<String>,
}

/// A measurement beside its yardstick.
#[derive(Debug, Serialize)]
pub(crate) struct Measure {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// The value's ratio to the yardstick of this run, and the goal of the ratio.
    pub(crate) ratio: Option<Ratio>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Ratio {
    pub(crate) of: String,
    pub(crate) value: f64,
    pub(crate) wanted: Option<Wanted>,
}

/// A target.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

impl Report {
    pub(crate) fn check(&mut self, what: impl Into<String>, result: Result<(), String>) {
        let check = Check { what: what.into(), wrong: result.err() };
        progress(&check.line());
        self.checks.push(check);
    }

    pub(crate) fn measure(&mut self, what: impl Into<String>, value: f64, unit: &'static str) {
        self.add(Measure { what: what.into(), value, unit, ratio: None });
    }

    /// Adds a value beside its yardstick, with a target if there is one.
    pub(crate) fn ratio(
        &mut self,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        of: (&str, f64),
        wanted: Option<Wanted>,
    ) {
        let ratio = Ratio { of: of.0.to_owned(), value: value / of.1, wanted };
        self.add(Measure { what: what.into(), value, unit, ratio: Some(ratio) });
    }

    fn add(&mut self, measure: Measure) {
        progress(&measure.line());
        self.measures.push(measure);
    }

    /// Whether no byte was wrong. No rate fails a run.
    pub(crate) fn is_right(&self) -> bool {
        self.checks.iter().all(|check| check.wrong.is_none())
    }

    pub(crate) fn table(&self) -> String {
        let mut text = match (&self.device, &self.skipped) {
            (Some(device), _) => format!("{device}; random bytes of seed {}\n\n", self.seed),
            (None, skipped) => {
                format!("nothing to check here: {}\n", skipped.as_deref().unwrap_or("no GPU"))
            }
        };
        self.checks.iter().for_each(|check| text += &format!("{}\n", check.line()));
        text += if self.checks.is_empty() { "" } else { "\n" };
        self.measures.iter().for_each(|measure| text += &format!("{}\n", measure.line()));
        self.notes.iter().for_each(|note| text += &format!("\nnote: {note}"));
        text
    }
}

impl Check {
    fn line(&self) -> String {
        let result = self.wrong.as_ref().map_or_else(|| "right".into(), |wrong| format!("WRONG: {wrong}"));
        format!("{:58} {result}", self.what)
    }
}

impl Measure {
    fn line(&self) -> String {
        let held = self.ratio.as_ref().map(Ratio::text).unwrap_or_default();
        format!("{:58} {:9.2} {:5} {held}", self.what, self.value, self.unit)
    }
}

impl Ratio {
    fn text(&self) -> String {
        let Self { of, value, wanted } = self;
        let judged = match *wanted {
            None => String::new(),
            Some(Wanted::AtLeast(least)) => format!(", wanted {least} {}", mark(*value >= least)),
            Some(Wanted::AtMost(most)) => format!(", wanted at most {most} {}", mark(*value <= most)),
        };
        format!("{value:.3} of {of}{judged}")
    }
}

/// Shows a row as soon as it is known, on standard error: a run that is ended early has said something.
fn progress(row: &str) {
    // Nobody listens, if this fails.
    let _ = writeln!(std::io::stderr(), "{row}");
}

fn mark(is_met: bool) -> &'static str {
    if is_met { "(met)" } else { "(MISSED)" }
}
