//! Messages between nodes, and between nodes and their coordinator.

use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddr};

use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, Join};
use larder_protocol::peer::{
    Announce, BlockLayers, Chunks, Class, Fetch, FetchedChunk, Find, FollowStep, Followed, HeldBlock,
    HeldChunk, Message, OfferChunks, PeerRequest, PeerResponse, Room, RowChange, RowSpan, Rows,
};
use larder_protocol::table::{
    Epoch, Holder, Member, MemberState, NodeNumber, PARTITIONS, RowKey, RunKey, Table, TableReader, pages,
};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};

use crate::message;

/// Tests the properties of `message::hold` for messages of all four kinds, and checks that a table that calls itself consistent
/// has a home for each partition.
///
/// Returns whether the bytes are a message of any kind.
///
/// # Panics
/// Panics if a property does not hold.
pub fn peer_messages(bytes: &[u8]) -> bool {
    let is_asked = hold::<PeerRequest>(bytes).is_some();
    let is_answer = hold::<PeerResponse>(bytes).is_some();
    let is_of_a_follower = hold::<FollowerMessage>(bytes).is_some();
    let of_a_coordinator = hold::<CoordinatorMessage>(bytes);
    if let Some(CoordinatorMessage::Table(page)) = &of_a_coordinator
        && let Ok(Some(table)) = TableReader::default().take(page.clone())
        && !table.members.is_empty()
    {
        let home = |partition| table.home(partition).and_then(|home| table.member(home));
        assert!((0..PARTITIONS).all(|partition| home(partition).is_some()));
    }
    is_asked || is_answer || is_of_a_follower || of_a_coordinator.is_some()
}

fn hold<M: Message + Debug>(bytes: &[u8]) -> Option<M> {
    message::hold(bytes, M::decode, M::encode)
}

/// One message of most kinds.
pub(crate) fn examples() -> Vec<Vec<u8>> {
    let asked = requests().iter().map(|message| message.encode().to_vec()).collect::<Vec<_>>();
    let answers = responses().iter().map(|message| message.encode().to_vec()).collect();
    let follower = [
        FollowerMessage::Join(Join {
            incarnation: 7,
            epoch: EPOCH,
            peer: address(1),
            http: address(2),
            devices: 2,
            weight: 1 << 40,
        }),
        FollowerMessage::Heartbeat(Heartbeat { epoch: EPOCH, silent: vec![NodeNumber(3)] }),
    ];
    let coordinator = [
        CoordinatorMessage::Table(pages(&Table::default(), &table()).remove(0)),
        CoordinatorMessage::Refused("no".into()),
        CoordinatorMessage::Contested(address(3)),
    ];
    let follower = follower.iter().map(|message| message.encode().to_vec()).collect();
    let coordinator = coordinator.iter().map(|message| message.encode().to_vec()).collect();
    [asked, answers, follower, coordinator].concat()
}

fn requests() -> Vec<PeerRequest> {
    let chunks = Chunks { device: 0, fingerprint: Fingerprint([1; 32]), hashes: vec![ChunkHash([2; 32]); 2] };
    let announce = Announce {
        holder: HOLDER,
        incarnation: 7,
        epoch: EPOCH,
        stream: 1,
        sequence: 0,
        digest: Some(11),
        changes: vec![RowChange { row: ROW, is_held: true }, RowChange { row: ROW, is_held: false }],
    };
    let chunk = ChunkRef {
        hash: ChunkHash([1; 32]),
        parent: ChunkHash([2; 32]),
        index: 3,
        anchor: ChunkHash([4; 32]),
    };
    let offer = OfferChunks { device: 0, fingerprint: chunks.fingerprint, worth: 7, chunks: vec![chunk] };
    vec![
        PeerRequest::Find(Find { epoch: EPOCH, rows: vec![ROW; 3] }),
        PeerRequest::Announce(vec![announce]),
        PeerRequest::Fetch(Fetch { chunks: chunks.clone(), block_bytes: vec![4_096], class: Class::Decode }),
        PeerRequest::Damaged(chunks),
        PeerRequest::Offer(offer),
        PeerRequest::SetPolicy("lru".into()),
        PeerRequest::Ping,
    ]
}

fn responses() -> Vec<PeerResponse> {
    let blocks = vec![HeldBlock { bytes: 4_096, checksum: 12 }];
    let held = HeldChunk { reads: 2, is_on_disk: true, pools: PoolSet(1), blocks };
    let layers = BlockLayers { block: 0, offset: 0, bytes: 2_048, checksum: 13 };
    vec![
        PeerResponse::Rows(Rows { epoch: EPOCH, spans: vec![RowSpan { from: 0, to: 3, holder: HOLDER }] }),
        PeerResponse::Room(Room { least: 7, served: 8 }),
        PeerResponse::Wanted(vec![true, false]),
        PeerResponse::Fetched(vec![FetchedChunk::Held(held), FetchedChunk::NotHeld]),
        PeerResponse::Followed(Followed { order: 1, message: 1, chunk: 0, step: FollowStep::Layers(layers) }),
        PeerResponse::Followed(Followed {
            order: 1,
            message: 2,
            chunk: 0,
            step: FollowStep::Whole(vec![14]),
        }),
    ]
}

fn table() -> Table {
    let member = Member {
        number: NodeNumber(1),
        name: "node-1".into(),
        incarnation: 7,
        peer: address(1),
        http: address(2),
        devices: 2,
        weight: 1,
        state: MemberState::Alive,
    };
    Table { epoch: EPOCH, members: vec![member], homes: vec![NodeNumber(1); usize::from(PARTITIONS)] }
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

const EPOCH: Epoch = Epoch { term: 2, number: 5 };
const HOLDER: Holder = Holder { node: NodeNumber(1), device: 0 };
const ROW: RowKey = RowKey { run: RunKey(1 << 100 | 7), chunk: 42 };
