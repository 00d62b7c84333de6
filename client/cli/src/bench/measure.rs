//! Measures two things in turns, so that the machine's drift hits both.

use std::time::Duration;

use crate::clock::now;

/// The median time of one pass of each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Medians {
    /// Of what is measured.
    pub subject_seconds: f64,
    /// Of the yardstick.
    pub yardstick_seconds: f64,
}

/// Passes of both in turns, first one without a count to warm up, then `rounds` of each.
///
/// # Errors
/// The first pass that fails.
///
/// # Panics
/// Where `rounds` is 0.
pub fn interleave<E>(
    rounds: usize,
    mut subject: impl FnMut() -> Result<(), E>,
    mut yardstick: impl FnMut() -> Result<(), E>,
) -> Result<Medians, E> {
    subject()?;
    yardstick()?;
    let mut times = [Vec::with_capacity(rounds), Vec::with_capacity(rounds)];
    for _ in 0..rounds {
        times[0].push(timed(&mut subject)?);
        times[1].push(timed(&mut yardstick)?);
    }
    let [subject_seconds, yardstick_seconds] = times.map(median);
    Ok(Medians { subject_seconds, yardstick_seconds })
}

fn timed<E>(pass: &mut impl FnMut() -> Result<(), E>) -> Result<Duration, E> {
    let start = now();
    pass()?;
    Ok(now() - start)
}

fn median(mut times: Vec<Duration>) -> f64 {
    assert!(!times.is_empty(), "a median needs at least one round");
    let middle = times.len() / 2;
    times.select_nth_unstable(middle).1.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn both_take_turns_after_one_pass_to_warm_up() {
        let order = RefCell::new(String::new());
        let note = |who| {
            order.borrow_mut().push(who);
            Ok::<(), Infallible>(())
        };
        let Ok(_) = interleave(3, || note('a'), || note('b'));
        assert_eq!(order.into_inner(), "abababab");
    }

    #[test]
    fn the_median_is_not_moved_by_one_slow_pass() {
        let times = [1, 900, 2, 3, 2].map(Duration::from_secs).to_vec();
        assert!((median(times) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_pass_that_fails_ends_the_measuring() {
        assert_eq!(interleave(3, || Ok(()), || Err("no")), Err("no"));
    }
}
