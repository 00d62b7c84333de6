//! Many engines at once: each asks again as soon as it has its answer.

use std::sync::Barrier;
use std::time::Duration;

use super::Measurement;
use crate::clock::now;

/// The requests of many engines: their number and latencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Time of each request, ascending.
    latencies: Vec<Duration>,
    /// From the first request to the last answer.
    took: Duration,
}

/// Runs `engines` threads at once; each sends `requests` requests, one after the other. Each thread calls `engine` for the
/// function that sends a request. The time counts from when all threads are ready. No engine ends before all are done: an end costs
/// the node more than a request.
///
/// # Errors
/// An engine cannot begin, or its request fails.
pub fn crowd<E: FnMut() -> anyhow::Result<()> + Send>(
    engines: usize,
    requests: usize,
    engine: impl Fn() -> anyhow::Result<E> + Sync,
) -> anyhow::Result<Seen> {
    let ready = Barrier::new(engines);
    let work = || {
        let made = engine();
        // The other threads wait for this one, even if it failed.
        ready.wait();
        let mut engine = made?;
        let start = now();
        let mut latencies = Vec::with_capacity(requests);
        for _ in 0..requests {
            let asked = now();
            engine()?;
            latencies.push(now() - asked);
        }
        anyhow::Ok((latencies, start, now(), engine))
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..engines).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let (mut latencies, mut starts, mut ends) =
        (Vec::with_capacity(engines * requests), Vec::new(), Vec::new());
    let mut done = Vec::with_capacity(engines);
    for seen in all {
        let (seen, start, end, engine) = seen.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        latencies.extend(seen);
        starts.push(start);
        ends.push(end);
        done.push(engine);
    }
    latencies.sort_unstable();
    let took = ends
        .into_iter()
        .max()
        .zip(starts.into_iter().min())
        .map_or(Duration::ZERO, |(last, first)| last - first);
    Ok(Seen { latencies, took })
}

impl Seen {
    /// Rows beside `other`, a yardstick with as many ends: thousands of requests a second, then the median and the 99th
    /// percentile of their times.
    pub fn beside(&self, name: &str, yardstick: &str, other: &Self) -> [Measurement; 3] {
        let at = |part| [self, other].map(|seen| seen.quantile(part).as_secs_f64());
        let [[p50, other_p50], [p99, other_p99]] = [at(0.5), at(0.99)];
        [
            Measurement::thousands(name, yardstick, [self, other].map(Self::a_second)),
            Measurement::microseconds(&format!("{name}_p50"), yardstick, p50, other_p50),
            Measurement::microseconds(&format!("{name}_p99"), yardstick, p99, other_p99),
        ]
    }

    fn a_second(&self) -> f64 {
        self.latencies.len() as f64 / self.took.as_secs_f64()
    }

    fn quantile(&self, part: f64) -> Duration {
        let at = (part * self.latencies.len() as f64) as usize;
        self.latencies.get(at.min(self.latencies.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn all_engines_are_ready_before_one_asks_and_none_ends_before_each_has_asked_as_often() {
        let (made, times, open) = (Mutex::new(0), Mutex::new(Vec::new()), Arc::new(()));
        let (made, asked, open) = (&made, &times, &open);
        let engine = || {
            *made.lock().unwrap() += 1;
            let is_open = Arc::clone(open);
            Ok(move || {
                assert_eq!(*made.lock().unwrap(), 4);
                assert_eq!(Arc::strong_count(&is_open), 1 + 4);
                asked.lock().unwrap().push(std::thread::current().id());
                Ok(())
            })
        };
        let seen = crowd(4, 25, engine).unwrap();
        let asked = times.into_inner().unwrap();
        assert_eq!((seen.latencies.len(), asked.len()), (100, 100));
        assert!(asked.iter().all(|one| asked.iter().filter(|other| *other == one).count() == 25));
        assert!(seen.latencies.is_sorted() && seen.took >= *seen.latencies.last().unwrap());
    }

    #[test]
    fn an_engine_that_cannot_begin_ends_the_measuring_and_keeps_nobody_waiting() {
        let made = Mutex::new(0);
        let engine = || {
            let mut made = made.lock().unwrap();
            *made += 1;
            anyhow::ensure!(*made != 2, "no room");
            Ok(|| Ok(()))
        };
        assert_eq!(crowd(3, 1, engine).unwrap_err().to_string(), "no room");
    }

    #[test]
    fn rows_tell_the_rate_the_median_and_the_slowest() {
        let seen = |us: u64| Seen {
            latencies: (1..=100).map(|part| Duration::from_micros(part * us)).collect(),
            took: Duration::from_millis(us),
        };
        let [rate, p50, p99] = seen(10).beside("lookup", "ping-pong", &seen(5));
        assert!((rate.value - 10.0).abs() < 1e-9 && (rate.ratio - 0.5).abs() < 1e-9, "{rate:?}");
        assert!((p50.value - 510.0).abs() < 1e-6 && (p50.ratio - 2.0).abs() < 1e-9, "{p50:?}");
        assert!((p99.value - 1_000.0).abs() < 1e-6, "{p99:?}");
    }
}
