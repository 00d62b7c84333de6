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
