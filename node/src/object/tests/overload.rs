//! A tier whose store, or the link to it, has more to do than it can.

use std::cell::Cell;

use super::*;
use crate::object::metrics::Side;

const WRITERS: u64 = 16;

/// Writes chunks for a while, as many at a time as uploads may be under way. Returns the number of chunks that the store has then.
async fn write_for(rig: &mut Rig, time: Duration) -> u64 {
    let (client, numbers, written) = (&rig.client, Cell::new(0), Cell::new(0));
    let slots = std::cell::RefCell::new(&mut rig.slots);
    let writers = (0..WRITERS).map(|_| async {
        loop {
            let number = numbers.replace(numbers.get() + 1);
            let order = slots.borrow_mut().write_order(single(3 * number));
            match client.write(order, deadline()).await {
                WriteAnswer::Durable => written.set(written.get() + 1),
                // The tier refuses orders for as long as it leaves the store alone.
                _ => sleep(Duration::from_millis(100)).await,
            }
        }
    });
    let trials = async {
        loop {
            client.trial(Side::Writing).await;
            client.try_again(Side::Writing, deadline()).await;
        }
    };
    tokio::select! {
        _ = join_all(writers) => {}
        () = trials => {}
        () = sleep(time) => {}
    }
    written.get()
}

fn many() -> ObjectOptions {
    ObjectOptions { max_in_flight: 2 * WRITERS as usize, ..options("memory:///") }
}

#[tokio::test(start_paused = true)]
async fn uploads_over_a_link_that_cannot_carry_them_all_at_a_time_go_on_fewer_at_a_time() {
    let mut rig = Rig::with(Faulty::default(), &many());
    // Sixteen objects of two or three pages take eight seconds together, and may take five.
    let (uplink, time) = (16_384.0, Duration::from_secs(200));
    rig.store.faults().uplink = Some(uplink);
    let written = write_for(&mut rig, time).await;
    let could = uplink * time.as_secs_f64() / 10_240.0;
    assert!(written as f64 >= 0.8 * could, "{written} of some {could}");
    // The link is quick again.
    rig.store.faults().uplink = Some(100.0 * uplink);
    rig.store.faults().most_at_once = 0;
    rig.store.faults().delay = Duration::from_millis(100);
    write_for(&mut rig, time).await;
    assert!(rig.store.faults().most_at_once as u64 >= WRITERS / 4 * 3);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_asks_for_fewer_requests_gets_fewer_uploads() {
    let mut rig = Rig::with(Faulty::default(), &many());
    rig.store.faults().delay = Duration::from_millis(100);
    rig.store.faults().most_requests = Some(4);
    let written = write_for(&mut rig, Duration::from_secs(100)).await;
    let refused = rig.store.faults().refused_uploads;
    assert!(refused * 4 < written, "{refused} were refused, {written} written");
    assert!(written >= 1_000, "{written} of some 2,000");
}

#[tokio::test(start_paused = true)]
async fn chunks_whose_uploads_lost_their_answers_are_there() {
    let mut rig = Rig::new();
    rig.store.faults().loses_answers = true;
    let start = Instant::now();
    assert_eq!(rig.write(1).await, WriteAnswer::Closed);
    assert!(start.elapsed() <= options("").timeout + Duration::from_secs(1));
    assert!(rig.client.is_open(Side::Writing), "nothing was heard of it");
    rig.client.try_again(Side::Writing, deadline()).await;
    assert!(rig.client.is_open(Side::Writing));
    rig.store.faults().loses_answers = false;
    rig.client.try_again(Side::Writing, deadline()).await;
    assert_eq!(rig.write(1).await, WriteAnswer::AlreadyThere);
    assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_read_over_a_dead_connection_is_made_again() {
    let mut rig = Rig::new();
    for number in 0..2 {
        rig.write(number).await;
    }
    rig.store.faults().hanging_gets = 1;
    let [first, other] = [0, 1].map(|number| rig.slots.read_order(single(number)));
    let later = async {
        sleep(Duration::from_secs(3)).await;
        rig.client.read(other, deadline()).await
    };
    let (read, later) = tokio::join!(rig.client.read(first, deadline()), later);
    assert!(matches!(read, ReadAnswer::Here { .. }) && matches!(later, ReadAnswer::Here { .. }));
    assert!(!rig.client.is_open(Side::Reading));
}
