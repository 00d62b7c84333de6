//! The device tier: chunks that engines load again are copied within the GPU.

use super::*;

#[test]
fn what_is_loaded_again_comes_to_the_device_tier_and_is_loaded_from_there() {
    let node = Node::tiered(8);
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 6);
    gpu.put_by_window(&hashes);
    gpu.load_and_check(&hashes);
    assert_eq!(node.status(0, "device_tier_blocks"), 0, "it was read once");
    gpu.load_and_check(&hashes[..4]);
    node.wait_for("device_tier_blocks", 4);
    assert_eq!(gpu.tiers(&hashes), [(Tier::Device, 4), (Tier::Host, 2)]);
    assert_eq!(gpu.tiers_among(&hashes, vec![Tier::Host]), [(Tier::Host, 6)], "as it was asked");
    gpu.load_and_check(&hashes);
    let read =
        format!(r#"larder_device_copied_bytes_total{{device="0",direction="tier"}} {}"#, 4 * BLOCK_BYTES);
    assert!(node.get("/metrics").contains(&read), "{}", node.get("/metrics"));
    assert_eq!(gpu.get_from_arena(&hashes), 6, "the host has it too");
    node.wait_for("leases", 0);
    node.wait_for("device_copies", 0);
}

#[test]
fn the_device_tier_evicts_what_is_loaded_less_and_never_what_is_being_read() {
    let node = Node::tiered(3);
    let gpu = node.engine(0);
    let (hot, cold) = (prompt(b'h', 2), prompt(b'c', 3));
    gpu.put_by_window(&hot);
    gpu.put_by_window(&cold);
    for _ in 0..30 {
        gpu.load_and_check(&hot);
        gpu.load_and_check(&cold);
    }
    // Blocks that enter the tier are summed first, after the loads.
    wait::until("the tier is full", || {
        gpu.load_and_check(&hot);
        gpu.load_and_check(&cold);
        (node.status(0, "device_tier_blocks") == 3).then_some(())
    });
    node.wait_for("device_copies", 0);
    let metrics = node.get("/metrics");
    let evicted =
        metrics.lines().find(|line| line.starts_with("larder_device_evicted_blocks_total{device=\"0\"}"));
    assert!(evicted.is_some_and(|line| !line.ends_with(" 0")), "{evicted:?}");
}

#[test]
fn a_promotion_that_fails_leaves_the_load_as_it_is_and_is_tried_again() {
    let node = Node::tiered(8);
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 2);
    gpu.put_by_window(&hashes);
    gpu.load_and_check(&hashes);
    node.controls[0].spare_next();
    node.controls[0].fail_next(Fault::Fail { after: 1 });
    gpu.load_and_check(&hashes);
    node.wait_for("device_copies", 0);
    assert_eq!((node.status(0, "device_tier_blocks"), gpu.tiers(&hashes)), (0, vec![(Tier::Host, 2)]));
    gpu.load_and_check(&hashes);
    node.wait_for("device_tier_blocks", 2);
    gpu.load_and_check(&hashes);
}

#[test]
fn a_lost_gpu_takes_its_tier_along_and_starts_with_an_empty_one() {
    let node = Node::tiered(4);
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 4);
    gpu.put_by_window(&hashes);
    (0..2).for_each(|_| gpu.load_and_check(&hashes));
    node.wait_for("device_tier_blocks", 4);
    node.controls[0].fail_next(Fault::Lose { after: 3 });
    assert_eq!(gpu.end(&gpu.load(&hashes, NO_FLAGS).unwrap()), CopyEnd::Lost);
    node.wait_for("device_tier_blocks", 0);
    wait::until("the device is gone", || (node.controls[0].gone() == 1).then_some(()));
    assert_eq!(gpu.tiers(&hashes), [(Tier::Host, 4)]);
    let again = node.engine(0);
    (0..2).for_each(|_| again.load_and_check(&hashes));
    node.wait_for("device_tier_blocks", 4);
    again.load_and_check(&hashes);
}
