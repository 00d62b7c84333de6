//! The figures that a core has its shell count.

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
