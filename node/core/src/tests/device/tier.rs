//! Tests of the device tier: blocks that stay in the device's memory, and are read there.

use super::*;

#[test]
fn what_is_loaded_again_goes_into_the_tier_where_it_is_right_and_is_verified_where_it_is_wrong() {
    let mut w = World::with_device();
    w.put("ab");
    let blocks = w.loaded("ab");
    assert!(w.is_idle(), "once read is not worth it");
    assert_eq!(w.loaded("ab"), blocks);
    let copy = w.copy(2);
    let wrong = Checksums { whole: 7, ..Checksums::default() };
    w.tell(Event::Copied { copy, answer: CopyAnswer::Done(vec![Checksums::default(), wrong.clone()]) });
    let (number, promoted) = w.promoting();
    let [Promoted { from, to: 0, bytes: BLOCK }] = promoted[..] else { panic!("{promoted:?}") };
    assert_eq!(BlockAt::Host(from), blocks[0]);
    let doubted = w.copy(1);
    assert_eq!(w.spans("ab", &[]), [span(0, 2, Tier::Host)], "it is on its way");
    w.device_ended(number, Ok(()));
    assert_eq!(w.spans("ab", &[]), [span(0, 1, Tier::Device), span(1, 2, Tier::Host)]);
    assert_eq!(w.spans("ab", &[Tier::Host]), [span(0, 2, Tier::Host)], "who asks for the host alone");
    w.tell(Event::Copied { copy: doubted, answer: CopyAnswer::Done(vec![wrong]) });
    assert!(matches!(w.next(), Effect::Condemned { keys, .. } if keys[0].hash == name("ab")));
    assert_eq!(w.spans("ab", &[]), [span(0, 1, Tier::Device)]);
    assert_eq!(w.loaded("a"), [BlockAt::Pool(0)]);
    assert!(w.is_idle());
}

#[test]
fn a_chunk_that_is_wrong_on_the_host_leaves_the_tier_too() {
    let mut w = World::with_device();
    w.put("ab");
    w.loaded("ab");
    assert_eq!(w.promote("ab").len(), 2);
    assert_eq!(w.spans("ab", &[]), [span(0, 2, Tier::Device)]);
    let (namespace, hash) = (w.namespace, name("ab"));
    let request = w.asks(w.session, Request::ReportDamage(ReportDamage { namespace, hash }));
    let copy = w.copy(1);
    let wrong = Checksums { whole: 7, ..Checksums::default() };
    w.tell(Event::Copied { copy, answer: CopyAnswer::Done(vec![wrong]) });
    w.answered(request);
    assert!(matches!(w.next(), Effect::Condemned { .. }));
    assert_eq!(w.core.usage().device_tier.blocks, 1);
    assert_eq!(w.spans("ab", &[]), [span(0, 1, Tier::Device)]);
}

#[test]
fn the_tier_makes_room_by_what_was_not_used_and_never_by_what_is_being_read() {
    let mut w = World::with_device();
    w.put("abc");
    w.put("xyz");
    for word in ["abc", "xyz"] {
        w.loaded(word);
    }
    assert_eq!(w.promote("abc").len(), 3);
    let (reading, copy) = w.load("abc");
    assert_eq!(copy.blocks, [BlockAt::Pool(0), BlockAt::Pool(BLOCK), BlockAt::Pool(2 * BLOCK)]);
    w.loaded("x");
    let sums = w.copy(1);
    w.copied(sums, 1);
    assert!(w.is_idle(), "no slot is free before the copy has ended");
    assert_eq!(w.core.usage().device_tier.blocks, 2);
    w.device_ended(reading, Ok(()));
    w.is_idle();
    let [Promoted { to: 0, .. }] = w.promote("x")[..] else { panic!("the slot that was given up") };
    assert_eq!(w.spans("abc", &[])[0], span(0, 1, Tier::Host));
    assert_eq!(w.core.usage().device_tier.evicted, 1);
}

#[test]
fn a_promotion_that_does_not_come_about_leaves_nothing_and_the_next_load_tries_again() {
    let mut w = World::with_device();
    w.put("a");
    w.loaded("a");
    for answer in [CopyAnswer::Busy, CopyAnswer::Failed, CopyAnswer::Impossible] {
        w.loaded("a");
        let copy = w.copy(1);
        w.tell(Event::Copied { copy, answer });
        assert!(w.is_idle());
    }
    w.loaded("a");
    let copy = w.copy(1);
    w.copied(copy, 1);
    let number = w.device_order().number;
    w.took(number, false);
    assert_eq!((w.spans("a", &[]), w.by_device()), (vec![span(0, 1, Tier::Host)], 0));
    let (failed, refused) = (Err(DeviceFailure::Failed), Err(DeviceFailure::Refused));
    for (is_late, end) in [(false, failed), (false, refused), (true, refused), (true, Ok(()))] {
        w.loaded("a");
        let copy = w.copy(1);
        w.copied(copy, 1);
        let (number, _) = w.promoting();
        if is_late {
            w.pass(Duration::from_millis(100));
            w.is_cancelled(number);
            assert_eq!(w.quarantined(), BLOCK);
        }
        w.device_ended(number, end);
        assert_eq!(w.spans("a", &[]), [span(0, 1, Tier::Host)]);
        assert_eq!((w.quarantined(), w.by_device()), (0, 0));
    }
    assert_eq!(w.promote("a").len(), 1);
    assert_eq!(w.spans("a", &[]), [span(0, 1, Tier::Device)]);
    assert!(w.is_at_rest());
}

#[test]
fn a_gpu_that_refuses_the_tier_is_not_asked_again_before_it_is_lost() {
    let mut w = World::with_device();
    w.put("a");
    w.loaded("a");
    w.loaded("a");
    let copy = w.copy(1);
    w.copied(copy, 1);
    let (number, _) = w.promoting();
    w.device_ended(number, Err(DeviceFailure::NoTier));
    w.loaded("a");
    assert!(w.is_idle(), "nothing is wanted");
    w.tell(Event::Device(DeviceEvent::Lost));
    w.tell(Event::Device(DeviceEvent::Gone));
    let tensors = w.know_tensors();
    let lease = w.lease_of("a").lease;
    let load = LoadPages { tensors, ..w.load_of(lease, 1) };
    let request = w.asks(w.session, Request::LoadPages(load));
    let (number, _) = w.begun(request);
    w.device_ended(number, Ok(()));
    w.copy(1);
}

#[test]
fn a_chunk_that_is_purged_before_its_copy_into_the_tier_is_not_copied() {
    let mut w = World::with_device();
    w.put("a");
    w.loaded("a");
    w.loaded("a");
    let copy = w.copy(1);
    let scope = PurgeScope::Tenant(TENANTS[0].to_owned());
    w.tell(Event::Purge(PurgeStep::Begin(1, scope.clone())));
    w.tell(Event::Purge(PurgeStep::Page { purge: 1, scope, mode: PurgeMode::Remove, from: 0 }));
    assert!(matches!(w.next(), Effect::Purged { .. }));
    w.copied(copy, 1);
    assert!(w.is_idle());
    assert_eq!((w.by_device(), w.core.usage().device_tier.blocks), (0, 0));
}

#[test]
fn a_block_that_was_read_in_the_tier_stays_longer_there() {
    let mut w = World::with_device();
    w.put("abc");
    w.put("x");
    w.loaded("abc");
    w.loaded("x");
    assert_eq!(w.promote("abc").len(), 3);
    let [BlockAt::Pool(used)] = w.loaded("a")[..] else { panic!("it is in the tier") };
    let [Promoted { to, .. }] = w.promote("x")[..] else { panic!("one block") };
    assert_ne!(to, used);
    assert_eq!(w.spans("abc", &[])[0], span(0, 1, Tier::Device));
}

#[test]
fn a_block_whose_copy_into_the_tier_stalls_is_copied_again_by_the_next_load() {
    let mut w = World::with_device();
    w.put("a");
    w.loaded("a");
    w.loaded("a");
    let copy = w.copy(1);
    w.copied(copy, 1);
    let (stalled, _) = w.promoting();
    w.pass(Duration::from_millis(100));
    w.is_cancelled(stalled);
    assert_eq!(w.promote("a").len(), 1);
    assert_eq!(w.spans("a", &[]), [span(0, 1, Tier::Device)]);
    w.device_ended(stalled, Ok(()));
    assert_eq!(w.spans("a", &[]), [span(0, 1, Tier::Device)]);
}
