//! The answers of a step: numbers, latencies, CPU time.

use std::collections::BTreeMap;
use std::time::Duration;

use comfy_table::Table;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::engine::{Answer, Kind};
use crate::output;

/// Latencies of the requests of a kind, each from the time at which it was due.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindSeen {
    /// Requests that were answered.
    pub answered: u64,
    /// The median time, in microseconds.
    pub p50_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// 99.9th percentile.
    pub p999_us: u64,
}

/// One rate of requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Planned requests a second.
    pub rate: f64,
    /// Requests that came.
    pub asked: u64,
    /// Answers a second.
    pub answered_a_second: f64,
    /// Requests that the node turned away, since it was busy or a block did not come in time.
    pub turned_away: u64,
    /// Requests without an answer 5 seconds after the last one came.
    pub unanswered: u64,
    /// CPUs that both nodes kept busy.
    pub node_cpus: f64,
    /// CPUs that the engines kept busy; all engines run in one thread.
    pub engine_cpus: f64,
    /// All requests together.
    pub all: KindSeen,
    /// Requests of each kind.
    pub kinds: BTreeMap<Kind, KindSeen>,
    /// Whether 99 % of all requests that came were answered within the limit.
    pub within_limit: bool,
}

/// The rate from which on the cluster does not keep up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Knee {
    /// The highest rate at which 99 % of requests were answered within the limit.
    pub rate: f64,
    /// Whether no higher rate was tried, so that the knee may be beyond.
    pub at_the_end: bool,
}

impl Knee {
    /// The knee of steps with rising rates; `None` if no step keeps the limit.
    pub fn of(steps: &[Step]) -> Option<Self> {
        let at = steps.iter().rposition(|step| step.within_limit)?;
        Some(Self { rate: steps[at].rate, at_the_end: at + 1 == steps.len() })
    }
}

/// The answers of a step so far.
#[derive(Debug)]
pub(super) struct Seen {
    rate: f64,
    /// Requests that came.
    pub(super) asked: usize,
    turned_away: u64,
    kinds: BTreeMap<Kind, Histogram<u64>>,
}

impl Seen {
    pub(super) fn new(rate: f64) -> Self {
        Self { rate, asked: 0, turned_away: 0, kinds: BTreeMap::new() }
    }

    pub(super) fn note(&mut self, answer: Answer) {
        if answer.turned_away {
            self.turned_away += 1;
            return;
        }
        let us = u64::try_from(answer.took.as_micros()).unwrap_or(u64::MAX);
        self.kinds.entry(answer.kind).or_insert_with(histogram).saturating_record(us);
    }

    /// The whole step: `took` from its first request to its last answer, with the CPU seconds of nodes and engines.
    pub(super) fn step(&self, took: Duration, cpu_seconds: (f64, f64), limit: Duration) -> Step {
        let mut all = histogram();
        for times in self.kinds.values() {
            all += times;
        }
        let asked = self.asked as u64;
        let within = all.count_between(0, limit.as_micros() as u64);
        let [answered_a_second, node_cpus, engine_cpus] =
            [all.len() as f64, cpu_seconds.0, cpu_seconds.1].map(|count| count / took.as_secs_f64());
        Step {
            rate: self.rate,
            asked,
            answered_a_second,
            turned_away: self.turned_away,
            unanswered: asked - all.len() - self.turned_away,
            node_cpus,
            engine_cpus,
            all: KindSeen::of(&all),
            kinds: self.kinds.iter().map(|(&kind, times)| (kind, KindSeen::of(times))).collect(),
            within_limit: within as f64 >= 0.99 * asked as f64,
        }
    }
}

impl KindSeen {
    fn of(times: &Histogram<u64>) -> Self {
        let [p50_us, p99_us, p999_us] = [0.5, 0.99, 0.999].map(|part| times.value_at_quantile(part));
        Self { answered: times.len(), p50_us, p99_us, p999_us }
    }
}

/// A histogram of times up to a minute, precise to a thousandth.
fn histogram() -> Histogram<u64> {
    #[expect(clippy::unwrap_used, reason = "the bounds are right")]
    Histogram::new_with_bounds(1, 60_000_000, 3).unwrap()
}

/// The steps as a table.
pub fn table(steps: &[Step]) -> Table {
    let mut table = output::table(&HEADINGS);
    for step in steps {
        let Step { all, .. } = step;
        let p99 = |kind| step.kinds.get(&kind).map_or_else(|| "-".into(), |seen| milliseconds(seen.p99_us));
        table.add_row([
            output::count(step.rate as u64),
            output::count(step.answered_a_second as u64),
            output::count(step.turned_away + step.unanswered),
            milliseconds(all.p50_us),
            milliseconds(all.p99_us),
            milliseconds(all.p999_us),
            p99(Kind::Lookup),
            p99(Kind::Lease),
            p99(Kind::Save),
            p99(Kind::Fetch),
            format!("{:.2}", step.node_cpus),
            format!("{:.2}", step.engine_cpus),
        ]);
    }
    for column in 0..HEADINGS.len() {
        output::align_right(&mut table, column);
    }
    table
}

fn milliseconds(us: u64) -> String {
    format!("{:.2}", us as f64 / 1e3)
}

const HEADINGS: [&str; 12] = [
    "due/s",
    "done/s",
    "not done",
    "p50 ms",
    "p99",
    "p99.9",
    "lookup p99",
    "lease",
    "save",
    "fetch",
    "node CPUs",
    "engine",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: Kind, ms: u64) -> Answer {
        Answer { kind, took: Duration::from_millis(ms), turned_away: false }
    }

    /// A step of 1,000 requests: `slow` take 20 ms, `unanswered` have no answer, and the others take 1 ms.
    fn step(rate: f64, slow: usize, unanswered: usize) -> Step {
        let mut seen = Seen::new(rate);
        seen.asked = 1_000;
        for number in unanswered..1_000 {
            let kind = if number % 2 == 0 { Kind::Lookup } else { Kind::Fetch };
            seen.note(answer(kind, if number < unanswered + slow { 20 } else { 1 }));
        }
        seen.step(Duration::from_secs(2), (1.0, 0.5), Duration::from_millis(10))
    }

    #[test]
    fn a_request_without_an_answer_misses_the_limit_as_a_slow_one_does() {
        assert!(step(1.0, 10, 0).within_limit && step(1.0, 0, 10).within_limit);
        assert!(!step(1.0, 11, 0).within_limit && !step(1.0, 6, 5).within_limit);
    }

    #[test]
    fn a_step_tells_rates_times_and_cpus_of_all_and_of_each_kind() {
        let step = step(500.0, 100, 4);
        assert_eq!((step.asked, step.unanswered, step.all.answered), (1_000, 4, 996));
        assert!((step.answered_a_second - 498.0).abs() < 1e-9);
        assert!((step.node_cpus - 0.5).abs() < 1e-9 && (step.engine_cpus - 0.25).abs() < 1e-9);
        assert_eq!((step.all.p50_us / 10, step.all.p99_us / 100), (100, 200));
        assert_eq!(step.kinds[&Kind::Lookup].answered + step.kinds[&Kind::Fetch].answered, 996);
        let drawn = table(&[step]).to_string();
        assert!(drawn.contains("498") && drawn.contains("due/s"), "{drawn}");
    }

    #[test]
    fn requests_that_are_turned_away_are_counted_and_have_no_time() {
        let mut seen = Seen::new(1.0);
        seen.asked = 2;
        seen.note(answer(Kind::Save, 1));
        seen.note(Answer { turned_away: true, ..answer(Kind::Save, 1) });
        let step = seen.step(Duration::from_secs(1), (0.0, 0.0), Duration::from_secs(1));
        assert_eq!((step.turned_away, step.unanswered, step.all.answered), (1, 0, 1));
        assert!(!step.within_limit);
    }

    #[test]
    fn the_knee_is_the_last_step_within_the_limit() {
        let steps = [step(1.0, 0, 0), step(2.0, 500, 0), step(3.0, 0, 0), step(4.0, 500, 0)];
        assert_eq!(Knee::of(&steps), Some(Knee { rate: 3.0, at_the_end: false }));
        assert!(Knee::of(&steps[..1]).unwrap().at_the_end);
        assert_eq!(Knee::of(&steps[1..2]), None);
    }
}
