//! A follower's reaction to the messages of the writer's node: right layers, and everything else.

use futures_util::future::join_all;
use larder_core::Event;
use larder_core::store::ids::TenantId;
use larder_protocol::checksum::{layers_checksum, range_checksum};
use larder_protocol::handoff::Writer;
use larder_protocol::peer::{BlockLayers, FollowChunks, FollowStep, Followed};

use super::*;
use crate::watched::plant;

/// A message of a writer's node, the errors in its order and number, and the bytes behind it.
pub(super) struct Says {
    order_off: u64,
    message_off: u64,
    chunk: u32,
    step: FollowStep,
    bytes: &'static [u8],
}

/// Sends the test's messages, then waits for the asker to go, or ends the stream.
pub(super) async fn play(says: Vec<Says>, ends: bool, ask: FollowChunks, mut send: SendStream) {
    for (number, Says { order_off, message_off, chunk, step, bytes }) in (1..).zip(says) {
        let followed = Followed {
            order: ask.order + order_off,
            message: u64::wrapping_add(number, message_off),
            chunk,
            step,
        };
        // The asker may have gone away.
        if write_message(&mut send, &PeerResponse::Followed(followed)).await.is_err()
            || send.write_all(bytes).await.is_err()
        {
            return;
        }
    }
    if ends {
        return send.finish().unwrap();
    }
    _ = send.stopped().await;
}

const HALF: u64 = BLOCK_BYTES / 2;

/// Half of a chunk's block.
fn half(chunk: u32, number: u64) -> Says {
    let bytes = &CONTENT[..HALF as usize];
    let offset = number * HALF;
    let checksum = layers_checksum(&key(&hash(chunk as u8)), &(offset..offset + HALF), range_checksum(bytes));
    let layers = BlockLayers { block: 0, offset, bytes: HALF, checksum };
    Says { order_off: 0, message_off: 0, chunk, step: FollowStep::Layers(layers), bytes }
}

fn layers_of(says: &Says) -> BlockLayers {
    match says.step {
        FollowStep::Layers(layers) => layers,
        _ => unreachable!("half a block"),
    }
}

fn with_layers(mut says: Says, change: impl FnOnce(&mut BlockLayers)) -> Says {
    if let FollowStep::Layers(layers) = &mut says.step {
        change(layers);
    }
    says
}

fn whole(chunk: u32, checksum: u64) -> Says {
    Says { order_off: 0, message_off: 0, chunk, step: FollowStep::Whole(vec![checksum]), bytes: &[] }
}

fn lost(chunk: u32) -> Says {
    Says { order_off: 0, message_off: 0, chunk, step: FollowStep::Lost, bytes: &[] }
}

fn hash(number: u8) -> ChunkHash {
    ChunkHash([number + 1; 32])
}

/// Follows two chunks. Returns the layers that came, and how each chunk ended.
async fn follow(asker: &Asker, holder: &Holder2, says: Vec<Says>, ends: bool) -> Vec<String> {
    holder.says.replace(Some((says, ends)));
    let (_cancel, cancelled) = oneshot::channel();
    follow_until(asker, cancelled, Vec::new()).await
}

/// Follows two chunks, which the holder says are lost.
pub(super) async fn follows_once(asker: &Asker, holder: &Holder2) -> Vec<String> {
    follow(asker, holder, vec![lost(0), lost(1)], false).await
}

async fn follow_until(asker: &Asker, cancelled: oneshot::Receiver<()>, pools: Vec<PoolSet>) -> Vec<String> {
    follow_of(asker, TenantId(0), cancelled, pools).await
}

async fn follow_of(
    asker: &Asker,
    tenant: TenantId,
    cancelled: oneshot::Receiver<()>,
    pools: Vec<PoolSet>,
) -> Vec<String> {
    let (news, mut came) = mpsc::unbounded_channel();
    let chunk = |number: u8| FetchChunk {
        hash: hash(number),
        blocks: vec![Destination {
            memory: Arc::clone(&asker.memory),
            offset: u64::from(number) * BLOCK_BYTES,
            bytes: BLOCK_BYTES,
            range_bytes: BLOCK_BYTES,
            key: key(&hash(number)),
        }],
    };
    let ordered = larder_core::FollowOrder {
        order: ORDER,
        writer: Writer { node: asker.other.clone(), device: 0 },
        fingerprint: SPACE,
        tenant,
        chunks: Vec::new(),
        pools,
        attempt: 0,
        patience_ms: 10_000,
    };
    let order = FollowOrder { ordered, chunks: vec![chunk(0), chunk(1)], news, cancelled };
    assert!(asker.handle.follow(order));
    let mut told = Vec::new();
    while let Some(event) = came.recv().await {
        told.push(match event {
            Event::LayersCame { order: ORDER, chunk, layers } => {
                format!("{chunk}: {}+{}", layers.offset, layers.bytes)
            }
            Event::FollowedCame { order: ORDER, chunk, came: Arrival::Here { checksums, .. } } => {
                assert_eq!(checksums[0].whole, checksum(&hash(chunk as u8)));
                format!("{chunk}: here")
            }
            Event::FollowedCame { order: ORDER, chunk, came: Arrival::Failed(failure) } => {
                format!("{chunk}: {failure:?}")
            }
            Event::FollowedCame { order: ORDER, chunk, came } => format!("{chunk}: {came:?}"),
            event => unreachable!("{event:?}"),
        });
    }
    told
}

const ORDER: OrderNumber = OrderNumber(7);
const FIRST: &str = "0: 0+32768";
const SECOND: &str = "0: 32768+32768";

#[test]
fn layers_come_into_their_slots_in_any_order_and_each_chunk_ends_by_itself() {
    between(ExchangeLimits::default(), async |asker, holder| {
        let says = vec![half(0, 1), half(0, 0), whole(0, checksum(&hash(0))), lost(1)];
        let came = follow(&asker, &holder, says, false).await;
        assert_eq!(came, [SECOND, FIRST, "0: here", "1: NotHeld"]);
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        asker.memory.copy_out(0, &mut bytes).unwrap();
        assert!(bytes == CONTENT);
    });
}

#[test]
fn a_chunk_that_has_ended_is_not_summed_again_in_slots_that_others_may_write() {
    between(ExchangeLimits::default(), async |asker, holder| {
        let whole = || whole(0, checksum(&hash(0)));
        let says = vec![half(0, 0), half(0, 1), whole(), whole(), lost(0), lost(1)];
        let came = follow(&asker, &holder, says, false).await;
        assert_eq!(came, [FIRST, SECOND, "0: here", "1: NotHeld"]);
    });
}

#[test]
fn a_follow_that_panics_tells_no_more_and_the_next_one_comes() {
    between(ExchangeLimits::default(), async |asker, holder| {
        plant("follow");
        assert!(follow(&asker, &holder, Vec::new(), true).await.is_empty());
        assert_eq!(asker.watch.panics("follow"), 1);
        let came = follow(&asker, &holder, vec![lost(0), lost(1)], false).await;
        assert_eq!(came, ["0: NotHeld", "1: NotHeld"]);
    });
}

#[test]
fn what_was_not_asked_for_ends_the_follow() {
    let too_far = with_layers(half(0, 1), |layers| layers.offset += 1);
    let no_such_block = with_layers(half(0, 1), |layers| layers.block = 1);
    let no_bytes = with_layers(half(0, 1), |layers| layers.bytes = 0);
    let overflow = with_layers(half(0, 1), |layers| layers.offset = u64::MAX);
    let wrong = [
        ("a late message of another order", Says { order_off: 1, ..half(0, 1) }),
        ("a message that comes again", Says { message_off: u64::MAX, ..half(0, 1) }),
        ("a message too many", Says { message_off: 1, ..half(0, 1) }),
        ("a chunk that there is not", half(2, 1)),
        ("layers that came before", half(0, 0)),
        ("layers beyond the block", too_far),
        ("layers of no block", no_such_block),
        ("no layers", no_bytes),
        ("layers beyond everything", overflow),
    ];
    for (what, says) in wrong {
        between(ExchangeLimits::default(), async |asker, holder| {
            let came = follow(&asker, &holder, vec![half(0, 0), says], false).await;
            assert_eq!(came, [FIRST, "0: Malformed", "1: Malformed"], "{what}");
        });
    }
}

#[test]
fn layers_with_another_checksum_lose_their_chunk_alone() {
    between(ExchangeLimits::default(), async |asker, holder| {
        let another = FollowStep::Layers(BlockLayers { block: 0, ..layers_of(&half(1, 1)) });
        for wrong in [
            with_layers(half(0, 1), |layers| layers.checksum ^= 1),
            // The right bytes, under the name of another chunk.
            Says { step: another, ..half(0, 1) },
        ] {
            let whole = whole(1, checksum(&hash(1)));
            let says = vec![half(0, 0), wrong, half(0, 1), half(1, 0), half(1, 1), whole];
            let came = follow(&asker, &holder, says, false).await;
            assert_eq!(came, [FIRST, "0: Damaged", "1: 0+32768", "1: 32768+32768", "1: here"]);
        }
    });
}

#[test]
fn a_commit_of_other_bytes_than_were_handed_over_or_of_too_few_is_a_loss() {
    between(ExchangeLimits::default(), async |asker, holder| {
        let says = vec![half(0, 0), half(0, 1), whole(0, 1), half(1, 0), whole(1, checksum(&hash(1)))];
        let came = follow(&asker, &holder, says, false).await;
        assert_eq!(came, [FIRST, SECOND, "0: Damaged", "1: 0+32768", "1: Malformed"]);
    });
}

#[test]
fn a_stream_that_breaks_off_after_any_message_loses_what_had_not_ended() {
    for messages in 0..4 {
        between(ExchangeLimits::default(), async |asker, holder| {
            let says = [half(0, 0), half(0, 1), whole(0, checksum(&hash(0)))];
            let came = follow(&asker, &holder, says.into_iter().take(messages).collect(), true).await;
            let mut expected = [FIRST, SECOND, "0: here"][..messages].to_vec();
            expected.extend(if messages == 3 { &["1: Broken"][..] } else { &["0: Broken", "1: Broken"] });
            assert_eq!(came, expected);
        });
    }
}

#[test]
fn a_follow_that_is_cancelled_or_whose_asker_is_gone_ends_and_stops_the_sender() {
    for is_told in [true, false] {
        between(ExchangeLimits::default(), async move |asker, holder| {
            holder.says.replace(Some((vec![half(0, 0)], false)));
            let (cancel, cancelled) = oneshot::channel();
            let cancelling = async {
                until("the holder is asked", || holder.says.borrow().is_none()).await;
                if is_told {
                    cancel.send(()).unwrap();
                } else {
                    drop(cancel);
                }
            };
            let (came, ()) = tokio::join!(follow_until(&asker, cancelled, Vec::new()), cancelling);
            assert!(came.ends_with(&["0: Deadline".to_owned(), "1: Deadline".to_owned()]), "{came:?}");
            until("the sender stops", || holder.plays.get() == 0).await;
        });
    }
}

#[test]
fn a_node_that_answers_no_probe_is_not_waited_for() {
    between(ExchangeLimits::default(), async |asker, holder| {
        holder.does.set(Does::Nothing);
        let came = follow(&asker, &holder, vec![half(0, 0)], false).await;
        assert_eq!(came, [FIRST, "0: Unreachable", "1: Unreachable"]);
    });
}

#[test]
fn a_node_that_is_no_member_is_not_followed() {
    between(ExchangeLimits::default(), async |mut asker, _| {
        asker.other = "nobody".to_owned();
        tokio::time::pause();
        let (_cancel, cancelled) = oneshot::channel();
        assert_eq!(follow_until(&asker, cancelled, Vec::new()).await, ["0: Unreachable", "1: Unreachable"]);
    });
}

#[test]
fn a_tenant_waits_for_few_nodes_that_are_no_members_and_leaves_places_to_other_tenants() {
    between(ExchangeLimits::default(), async |mut asker, _| {
        asker.other = "nobody".to_owned();
        tokio::time::pause();
        let follow = async |tenant| {
            let (_cancel, cancelled) = oneshot::channel();
            follow_of(&asker, tenant, cancelled, Vec::new()).await
        };
        let many = join_all((0..100).map(|_| follow(TenantId(0))));
        let (many, one) = tokio::join!(many, follow(TenantId(1)));
        let refused = many.iter().filter(|came| **came == ["0: Full", "1: Full"]).count();
        let waited = many.iter().filter(|came| **came == ["0: Unreachable", "1: Unreachable"]).count();
        assert_eq!((refused, waited), (36, 64));
        assert_eq!(one, ["0: Unreachable", "1: Unreachable"]);
    });
}

#[test]
fn a_node_of_version_1_is_not_asked_to_hand_over_some_pools_alone() {
    between_versions([Version::LATEST, Version::FIRST], ExchangeLimits::default(), async |asker, holder| {
        let (_cancel, cancelled) = oneshot::channel();
        let came = follow_until(&asker, cancelled, vec![PoolSet(1), PoolSet(3)]).await;
        assert_eq!((came, holder.plays.get()), (vec!["0: Broken".to_owned(), "1: Broken".to_owned()], 0));
    });
}
