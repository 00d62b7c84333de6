//! Measures several things in turns, so that the machine's drift hits all of them.

use std::time::Duration;

use crate::clock::now;

/// One pass; it returns the time of its measured part.
pub type Pass<'a> = &'a mut dyn FnMut() -> anyhow::Result<Duration>;

/// The median seconds of each pass: first one round without a count to warm up, then `rounds` of all, in turns.
///
/// # Errors
/// The first pass that fails.
///
/// # Panics
/// Panics if `rounds` is 0.
pub fn medians<const N: usize>(rounds: usize, mut passes: [Pass<'_>; N]) -> anyhow::Result<[f64; N]> {
    let mut times = [const { Vec::new() }; N];
    for round in 0..=rounds {
        for (pass, times) in passes.iter_mut().zip(&mut times) {
            let took = pass()?;
            if round > 0 {
                times.push(took);
            }
        }
    }
    Ok(times.map(median))
}

/// Times all of `work`.
///
/// # Errors
/// The error of `work`.
pub fn timed<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<Duration> {
    let start = now();
    let done = work()?;
    let took = now() - start;
    std::hint::black_box(done);
    Ok(took)
}

fn median(mut times: Vec<Duration>) -> f64 {
    assert!(!times.is_empty(), "a median needs at least one round");
    let middle = times.len() / 2;
    times.select_nth_unstable(middle).1.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn all_take_turns_after_one_pass_to_warm_up() {
        let order = RefCell::new(String::new());
        let note = |who, took: u64| {
            order.borrow_mut().push(who);
            Ok(Duration::from_secs(took))
        };
        let found = medians(3, [&mut || note('a', 1), &mut || note('b', 2)]).unwrap();
        assert_eq!(order.into_inner(), "abababab");
        assert!((found[0] - 1.0).abs() < 1e-9 && (found[1] - 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_median_is_not_moved_by_one_slow_pass() {
        let times = [1, 900, 2, 3, 2].map(Duration::from_secs).to_vec();
        assert!((median(times) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_pass_that_fails_ends_the_measuring() {
        assert!(medians(3, [&mut || Ok(Duration::ZERO), &mut || anyhow::bail!("no")]).is_err());
    }
}
