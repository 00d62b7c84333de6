//! The figures that a core has its shell count.

use larder_protocol::session::Found;

use super::*;

#[test]
fn a_policy_counts_as_another_one_only_if_it_is() {
    let mut w = World::new(PEERS);
    w.tell(Event::PolicyIs(PolicyName::Lru));
    assert!(w.core.poll_effect().is_none_or(|effect| matches!(effect, Effect::Knows { .. })));
    w.tell(Event::PolicyIs(PolicyName::Sieve));
    let counted: Vec<_> = std::iter::from_fn(|| w.core.poll_effect()).collect();
    assert!(matches!(counted[..], [Effect::Count(Counted::PolicyChanged(PolicyName::Sieve))]), "{counted:?}");
    assert_eq!(w.core.store().policy(), PolicyName::Sieve);
}

#[test]
fn a_hit_counts_the_prefill_that_it_saves_whatever_speed_the_engine_says() {
    let mut w = World::new(PEERS);
    w.put("ab");
    for (speed, seconds) in [
        (Some(16.0), Some(2.0)),
        (Some(0.1), Some(32.0)),
        (Some(0.0), None),
        (Some(f64::NAN), None),
        (None, None),
    ] {
        let ask = Lookup { prefill_tokens_per_second: speed, ..w.ask("ab") };
        w.asks(w.session, Request::Lookup(ask));
        let counted = std::iter::from_fn(|| w.core.poll_effect()).find_map(|effect| match effect {
            Effect::Count(Counted::Avoided(_, seconds)) => Some(seconds),
            _ => None,
        });
        assert_eq!(counted, seconds, "{speed:?}");
    }
}

#[test]
fn a_lookup_counts_the_chunks_that_it_could_hit() {
    let mut w = World::new(PEERS);
    w.put("ab");
    let found = Found { tokens: 32, spans: Vec::new(), pin: None };
    let ask = Lookup { prompt_tokens: 48, ..w.ask("abc") };
    let lookup = w.core.looked_up(&ask, &found).unwrap();
    assert_eq!((lookup.usable.len(), lookup.is_whole()), (2, true), "a token is left to compute");
    let past = lookup.past();
    assert_eq!((past.namespace, past.chunk_tokens, past.tokens_hit), (w.fingerprint, 16, 32));
    let boundless = Lookup { prompt_tokens: u64::MAX, ..ask.clone() };
    let lookup = w.core.looked_up(&boundless, &found).unwrap();
    assert_eq!((lookup.usable.len(), lookup.prompt_tokens), (3, 1 << 32));
    assert!(w.core.looked_up(&Lookup { namespace: u32::MAX, ..ask }, &found).is_none());
}
