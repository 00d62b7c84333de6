//! Shows the progress of a run, and its results.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::options::Options;
use super::tally::{Counts, Tally};

/// The results of a run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) passed: bool,
    interrupted: bool,
    scenario: &'static str,
    seed: u64,
    /// The command that repeats the run.
    command: String,
    hit_rate: f64,
    #[serde(flatten)]
    counts: Counts,
    verdicts: Vec<Verdict>,
    /// The folder of the logs.
    pub(super) kept: Option<PathBuf>,
}

/// Something that was watched besides the counts.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Verdict {
    /// The subject of the verdict.
    pub(super) what: String,
    /// The observation, for people.
    pub(super) seen: String,
    /// Whether the observation is as it should be; `None` if too little was seen to say so.
    pub(super) is_good: Option<bool>,
}

impl Report {
    pub(super) fn new(options: &Options, counts: Counts, verdicts: Vec<Verdict>, interrupted: bool) -> Self {
        let good = verdicts.iter().all(|verdict| verdict.is_good != Some(false));
        Self {
            passed: counts.are_clean() && good && !interrupted,
            interrupted,
            scenario: options.scenario.name(),
            seed: options.seed,
            command: options.command(),
            hit_rate: counts.hit_rate(),
            counts,
            verdicts,
            kept: None,
        }
    }

    /// Prints the report for people, or as JSON. A reader that has gone away is no error.
    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json { serde_json::to_string(self)? } else { self.table() };
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            printed => printed,
        }
    }

    fn table(&self) -> String {
        let counts = &self.counts;
        let mut rows = vec![
            row("time", format!("{:.1} s", counts.seconds)),
            row("requests", counts.requests),
            row("chunks asked", counts.chunks_asked),
            row("hit", format!("{:.1} %", 100.0 * self.hit_rate)),
            row("checked", format!("{:.1} GiB", counts.bytes_checked as f64 / f64::from(1 << 30))),
            row("asked again after a kill or stop", counts.asked_again),
            row("busy answers, given up", format!("{}, {}", counts.busy_answers, counts.given_up)),
            row("kills, stops, clones", format!("{}, {}, {}", counts.kills, counts.stops, counts.clones)),
            row("hostile connections", counts.hostile_connections),
            row("wrong bytes", counts.wrong_bytes),
            row("failed requests", counts.failed_requests),
            row("deaths", counts.deaths),
        ];
        if counts.rounds > 0 {
            rows.insert(1, row("rounds", counts.rounds));
        }
        for verdict in &self.verdicts {
            let mark = match verdict.is_good {
                Some(true) => "",
                Some(false) => " (NOT GOOD)",
                None => " (too short a run to say)",
            };
            rows.push(row(&verdict.what, format!("{}{mark}", verdict.seen)));
        }
        let mut text = rows.concat();
        let lists =
            [("wrong bytes", &counts.wrong), ("failed", &counts.failures), ("left out", &counts.left_out)];
        for (name, list) in lists {
            list.iter().for_each(|entry| text += &format!("{name}: {entry}\n"));
        }
        for death in &counts.died {
            let panic = death.panic.as_deref().unwrap_or("no panic in its log");
            text += &format!(
                "died: {} after {:.1} s, {}: {panic}\n",
                death.process, death.after_seconds, death.how
            );
        }
        if let Some(kept) = &self.kept {
            text += &format!("logs: {}\n", kept.display());
        }
        let verdict = match (self.passed, self.interrupted) {
            (true, _) => "passed".to_owned(),
            (false, true) => "interrupted".to_owned(),
            (false, false) => format!("FAILED with seed {}; again: {}", self.seed, self.command),
        };
        text + &verdict
    }
}

/// Prints a line every few seconds, to standard error, until it is dropped.
pub(super) async fn show_progress(tally: &Tally, options: &Options) {
    if options.quiet {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(PAUSE).await;
        let counts = tally.counts();
        let round = if counts.rounds > 0 { format!("  round {}", counts.rounds) } else { String::new() };
        eprintln!(
            "{:6.0} s{round}  {} requests  {:.1} % hit  wrong bytes {}  failed {}  deaths {}  kills {}",
            counts.seconds,
            counts.requests,
            100.0 * counts.hit_rate(),
            counts.wrong_bytes,
            counts.failed_requests,
            counts.deaths,
            counts.kills
        );
    }
}

fn row(name: &str, value: impl std::fmt::Display) -> String {
    format!("{name:<34} {value}\n")
}

const PAUSE: Duration = Duration::from_secs(5);
