//! Asks many servers at once.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};

/// Asks all at once, on threads, and returns the answers in the same order. If the system gives fewer threads, fewer are asked at a
/// time.
pub(crate) fn together<T: Sync, R: Send>(all: &[T], ask: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, answers) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(all.len())));
    let work = || loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let Some(one) = all.get(at) else { return };
        let answer = ask(one);
        larder_net::lock(&answers).push((at, answer));
    };
    thread::scope(|scope| {
        for _ in 1..all.len().min(ASKED_AT_ONCE) {
            // An error: the other threads ask.
            let _ = Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let mut answers = std::mem::take(&mut *larder_net::lock(&answers));
    answers.sort_unstable_by_key(|&(at, _)| at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// The most servers that are asked at a time: each takes a thread or a socket.
pub(crate) const ASKED_AT_ONCE: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn many_are_asked_at_once_and_answers_keep_their_order() {
        let all: Vec<usize> = (0..3 * ASKED_AT_ONCE).collect();
        let at_once = Barrier::new(ASKED_AT_ONCE);
        let answers = together(&all, |&one| {
            at_once.wait();
            2 * one
        });
        assert_eq!(answers, all.iter().map(|one| 2 * one).collect::<Vec<_>>());
        assert!(together(&[], |&one: &usize| one).is_empty());
    }
}
