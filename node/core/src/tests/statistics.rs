//! Tests of the figures that a core makes its shell count.

use larder_protocol::pin::PinStart;
use larder_protocol::session::Found;

use super::*;
use crate::lookups::LookupFilter;
use crate::{AdminPin, Millis};

#[test]
fn a_policy_counts_as_another_one_only_if_it_is() {
    let mut w = World::new(PEERS);
    w.tell(Event::PolicyIs(PolicyName::Lru));
    assert!(w.core.poll_effect().is_none_or(|effect| matches!(effect, Effect::Knows { .. })));
    w.tell(Event::PolicyIs(PolicyName::Sieve));
    let counted: Vec<_> = std::iter::from_fn(|| w.core.poll_effect()).collect();
    assert!(matches!(counted[..], [Effect::Count(Counted::PolicyChanged(PolicyName::Sieve))]), "{counted:?}");
    assert_eq!(w.core.store().policy(), PolicyName::Sieve);
    w.core.begin_anew();
    assert_eq!(w.core.store().policy(), PolicyName::Sieve, "whatever policy the node began with");
}

#[test]
fn a_policy_that_is_set_again_keeps_what_it_learned() {
    let mut w = World::new(PEERS);
    w.tell(Event::PolicyIs(PolicyName::Slru));
    w.put("a");
    w.held("a");
    w.put("b");
    let victims = |w: &mut World| {
        w.tell(Event::PolicyIs(PolicyName::Slru));
        (b'c'..b'z')
            .map(|word| (word as char).to_string())
            .take_while(|word| {
                w.put(word);
                w.held("b") > 0
            })
            .count()
    };
    assert!(victims(&mut w) > 0);
    assert_eq!(w.held("a"), 1, "it was used twice");
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
    let session = w.session;
    let lookup = w.core.looked_up(session, &ask, &found).unwrap();
    assert_eq!((lookup.usable.len(), lookup.is_whole()), (2, true), "a token is left to compute");
    let past = lookup.past();
    assert_eq!((past.namespace, past.chunk_tokens, past.tokens_hit), (w.fingerprint, 16, 32));
    let boundless = Lookup { prompt_tokens: u64::MAX, ..ask.clone() };
    let lookup = w.core.looked_up(session, &boundless, &found).unwrap();
    assert_eq!((lookup.usable.len(), lookup.prompt_tokens), (3, 64), "its fourth chunk would be named");
    let skipped = Lookup { skip_read: true, ..boundless };
    assert_eq!(w.core.looked_up(session, &skipped, &found).unwrap().prompt_tokens, 1 << 32);
    assert!(w.core.looked_up(session, &Lookup { namespace: u32::MAX, ..ask }, &found).is_none());
}

#[test]
fn lookups_for_an_operator_are_answered_and_neither_counted_nor_logged() {
    let mut w = World::new(PEERS);
    w.put("ab");
    let ask = Lookup { prefill_tokens_per_second: Some(16.0), ..w.ask("ab") };
    w.asks(w.session, Request::Observe);
    w.asks(w.session, Request::Lookup(ask.clone()));
    let effects: Vec<_> = std::iter::from_fn(|| w.core.poll_effect()).collect();
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Count(_))), "{effects:?}");
    let Some(Effect::Found { found, .. }) = effects.last() else { panic!("{effects:?}") };
    assert_eq!(found.tokens, 32);
    assert!(w.core.looked_up(w.session, &ask, found).is_none());
    assert!(w.core.explain_lookups(&LookupFilter { most: 9, ..Default::default() }).records.is_empty());
}

#[test]
fn a_chunk_under_another_place_than_its_own_is_refused_and_counted() {
    let mut w = World::new(PEERS);
    w.put("abc");
    let mut moved = w.chain("abc");
    moved.hashes.remove(0);
    let ask = Lookup { chain: Chain::from_root(w.root, moved.hashes), ..w.ask("") };
    let request = w.asks(w.session, Request::Lookup(ask));
    let effects: Vec<_> = std::iter::from_fn(|| w.core.poll_effect()).collect();
    assert!(
        effects.iter().any(|effect| matches!(effect, Effect::Count(Counted::NameRefused))),
        "{effects:?}"
    );
    assert!(
        effects.iter().any(|effect| matches!(effect, Effect::Refused { request: of, .. } if *of == request))
    );
}

#[test]
fn an_admin_pins_what_is_here_and_ends_the_pin_once() {
    let mut w = World::new(PEERS);
    w.put("ab");
    let (fingerprint, hashes) = (w.fingerprint, w.chain("ab").hashes);
    let start = AdminPin::Start(PinStart { fingerprint, hashes, duration_ms: 1_000 });
    let pinned = w.core.pin_for_admin(start, Millis(0)).unwrap();
    assert_eq!(pinned.chunks, 2);
    assert_eq!(w.core.pin_for_admin(AdminPin::End(pinned.pin), Millis(0)).unwrap().chunks, 0);
    let again = w.core.pin_for_admin(AdminPin::End(pinned.pin), Millis(0));
    assert_eq!(again, Err(Refused::UnknownPin(pinned.pin)));
}

#[test]
fn a_tail_of_a_prompt_counts_with_the_chunks_before_it_and_is_not_kept_for_other_caches() {
    let mut w = World::new(PEERS);
    w.put("ab");
    let found = Found { tokens: 16, spans: Vec::new(), pin: None };
    let ask = Lookup { chain: w.chain("abc").part(1, 3), prompt_tokens: u64::MAX, ..w.ask("abc") };
    let session = w.session;
    let lookup = w.core.looked_up(session, &ask, &found).unwrap();
    assert_eq!((lookup.is_whole(), lookup.prompt_tokens), (false, 64), "as the whole prompt would");
    assert_eq!(w.core.past(), []);
    w.core.looked_up(session, &w.ask("abc"), &found).unwrap();
    assert_eq!(w.core.past().len(), 1);
}
