//! Tells when requests are due, precise to some 50 microseconds. It uses a thread, since Tokio's timers tick by the millisecond.

use std::io;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::clock::now;

/// Sends the time at which each request is due, until `lasting` is over. Requests come at random, `rate` a second on average (a
/// Poisson process).
///
/// The thread ends early when the receiver is dropped, or falls `room` requests behind.
///
/// # Errors
/// The system starts no thread.
pub(super) fn arrivals(
    rate: f64,
    start: Instant,
    lasting: Duration,
    room: usize,
) -> io::Result<mpsc::Receiver<Instant>> {
    let (tell, arrivals) = mpsc::channel(room);
    std::thread::Builder::new().name("arrivals".into()).spawn(move || {
        let mut random = fastrand::Rng::with_seed(rate.to_bits());
        let mut due = start;
        loop {
            due += Duration::from_secs_f64(-(1.0 - random.f64()).ln() / rate);
            if due >= start + lasting {
                return;
            }
            std::thread::sleep(due.saturating_duration_since(now()));
            if tell.try_send(due).is_err() {
                return;
            }
        }
    })?;
    Ok(arrivals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_come_in_order_and_not_before_they_are_due() {
        let (start, lasting) = (now(), Duration::from_millis(20));
        let mut arrivals = arrivals(10_000.0, start, lasting, 1_000).unwrap();
        let (mut count, mut last) = (0, start);
        while let Some(due) = arrivals.recv().await {
            assert!(last <= due && due <= now() && due < start + lasting);
            (count, last) = (count + 1, due);
        }
        assert!((100..300).contains(&count), "{count} of some 200");
    }

    #[tokio::test]
    async fn arrivals_end_when_nobody_takes_them_in_time() {
        let mut arrivals = arrivals(1e6, now(), Duration::from_secs(3_600), 2).unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(arrivals.recv().await.is_some() && arrivals.recv().await.is_some());
        assert!(arrivals.recv().await.is_none());
    }
}
