//! Engines that break the rules: each gets a clear error or leaves a quarantine, the node lives, nobody else notices, and memory
//! that somebody could still touch is not reused.

use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use larder_ipc::Mapping;
use larder_ipc::socket::FrameWriter;
use larder_protocol::frame::FrameHeader;
use larder_protocol::limits::{MAX_FRAME_BYTES, SESSION_VERSION};
use larder_protocol::session::{Hello, Lease, Pin, RefusalCode, Request, Response, encode_request};
use larder_protocol::{Chain, ChunkHash};
use larder_tests::content::{BLOCK_BYTES, block, prompt};
use larder_tests::engine::EngineProcess;
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::raw::{RawSession, commit, hello, register, reserve};
use larder_tests::wait;
use rkyv::util::AlignedVec;
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use rustix::io::{Errno, pwrite};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};

use super::{ENGINE, Engine, LARDER};

/// A node that has the prompt `a`, and a well-behaved engine.
fn stage() -> (NodeProcess, Engine) {
    let node = NodeProcess::small(LARDER).unwrap();
    let innocent = Engine::connect(&node.socket("default"));
    assert_eq!(innocent.put(&prompt(b'a', 4)), 4);
    (node, innocent)
}

/// The innocent engine still gets right bytes and can still put.
fn nothing_happened(node: &NodeProcess, innocent: &Engine) {
    assert_eq!(innocent.get(&prompt(b'a', 4)), 4, "{}", node.log());
    assert_eq!(innocent.put(&prompt(b'z', 2)), 2, "{}", node.log());
    assert_eq!(innocent.get(&prompt(b'z', 2)), 2, "{}", node.log());
    assert_eq!(node.get("/healthz").unwrap(), "ok\n");
}

/// The node's refusal before it closed the connection.
fn last_words(session: &mut RawSession) -> Option<(RefusalCode, String)> {
    let mut words = None;
    while let Ok(Some((response, _))) = session.read() {
        if let Response::Refused(refusal) = response {
            words = Some((refusal.code, refusal.message));
        }
    }
    words
}

#[test]
fn the_arena_cannot_be_truncated_overwritten_or_mapped_writable() {
    let (node, innocent) = stage();
    let (mut session, registered, _window) = RawSession::open(&node.socket("default")).unwrap();
    let lease = session.lease(&registered, &prompt(b'a', 4)).unwrap();
    let (memory, bytes) = (&lease.memory[0], lease.extents[0].bytes);
    assert_eq!(ftruncate(memory, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(memory, 2 * bytes), Err(Errno::PERM));
    assert_eq!(pwrite(memory, b"x", 0), Err(Errno::PERM));
    assert!(Mapping::writable(memory.as_fd(), bytes).is_err());
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(memory));
    let reopened = open(path, OFlags::RDWR, Mode::empty());
    if let Ok(reopened) = &reopened {
        assert_eq!(pwrite(reopened, b"x", 0), Err(Errno::PERM));
        assert!(Mapping::writable(reopened.as_fd(), bytes).is_err());
    }
    let readable = Mapping::read_only(memory.as_fd(), bytes).unwrap();
    let mut read = vec![0; BLOCK_BYTES];
    readable.copy_to(lease.places[0].offset, &mut read);
    assert_eq!(read, block(&prompt(b'a', 1)[0]));
    nothing_happened(&node, &innocent);
}

#[test]
fn the_write_window_cannot_be_truncated() {
    let (node, innocent) = stage();
    let (_session, _, window) = RawSession::open(&node.socket("default")).unwrap();
    assert_eq!(ftruncate(window.unwrap(), 0), Err(Errno::PERM));
    nothing_happened(&node, &innocent);
}

#[test]
fn what_is_written_into_the_window_after_the_commit_changes_nothing() {
    let (node, innocent) = stage();
    let (mut session, registered, window) = RawSession::open(&node.socket("default")).unwrap();
    let window = Mapping::writable(window.unwrap().as_fd(), 1 << 20).unwrap();
    let hashes = prompt(b'b', 2);
    let Response::Reserved(reserved) = session.ask(&reserve(&registered, &hashes)).unwrap().0 else {
        panic!("there is room")
    };
    for (position, hash) in hashes.iter().enumerate() {
        window.copy_from((position * BLOCK_BYTES) as u64, &block(hash));
    }
    assert_eq!(session.ask(&commit(reserved.reservation, 2)).unwrap().0, Response::Committed(2));
    window.copy_from(0, &vec![0xff; 2 * BLOCK_BYTES]);
    assert_eq!(innocent.get(&hashes), 2);
    nothing_happened(&node, &innocent);
}

#[test]
fn bytes_that_are_no_session_are_refused() {
    let (node, innocent) = stage();
    let header =
        |payload_bytes, descriptors| FrameHeader { payload_bytes, descriptors, request: 1 }.encode().to_vec();
    let garbage = [header(64, 0), vec![0xa5; 64]].concat();
    let cases: [(&str, Vec<u8>); 5] = [
        ("not a Larder session", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("at most 1048576 are allowed", header(MAX_FRAME_BYTES as u32 + 1, 0)),
        ("at most 128 are allowed", header(16, 129)),
        ("announces 1 descriptors, but 0 came", [header(16, 1), vec![0; 16]].concat()),
        ("no message of this version", garbage),
    ];
    for (expected, bytes) in cases {
        for after_hello in [false, true] {
            let mut session = RawSession::connect(&node.socket("default")).unwrap();
            if after_hello {
                session.ask(&hello()).unwrap();
            }
            session.send_bytes(&bytes).unwrap();
            let (code, text) = last_words(&mut session).expect("the node says why");
            assert_eq!(code, RefusalCode::Protocol);
            assert!(text.contains(expected), "{text}");
        }
    }
    nothing_happened(&node, &innocent);
    assert!(
        node.get("/metrics")
            .unwrap()
            .contains(r#"larder_session_ends_total{how="protocol_error",tenant="default"} 5"#)
    );
}

#[test]
fn a_frame_that_never_ends_keeps_nobody_waiting() {
    let (node, innocent) = stage();
    let mut session = RawSession::connect(&node.socket("default")).unwrap();
    session.ask(&hello()).unwrap();
    let header = FrameHeader { payload_bytes: 1_000_000, descriptors: 0, request: 1 }.encode();
    session.send_bytes(&header).unwrap();
    session.send_bytes(&[0; 1_000]).unwrap();
    nothing_happened(&node, &innocent);
    node.wait_for("sessions", 2);
    drop(session);
    node.wait_for("sessions", 1);
}

#[test]
fn foreign_descriptors_are_closed_and_refused() {
    let (node, innocent) = stage();
    let descriptors =
        |node: &NodeProcess| std::fs::read_dir(format!("/proc/{}/fd", node.pid())).unwrap().count();
    let before = descriptors(&node);
    let mut session = RawSession::connect(&node.socket("default")).unwrap();
    session.ask(&hello()).unwrap();
    let memory: Vec<OwnedFd> =
        (0..100).map(|_| memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap()).collect();
    let mut writer = FrameWriter::new();
    // A response is no request, but its frame carries descriptors.
    writer.push_response(9, &Response::Unpinned, memory).unwrap();
    writer.flush(session.socket().as_fd()).unwrap();
    let (code, text) = last_words(&mut session).expect("the node says why");
    assert_eq!(
        (code, text.as_str()),
        (RefusalCode::Protocol, "only a registration of tensors may have descriptors")
    );
    drop(session);
    node.wait_for("sessions", 1);
    wait::until("the descriptors to be closed", || (descriptors(&node) <= before).then_some(()));
    nothing_happened(&node, &innocent);
}

/// A descriptor whose last close waits for a day, as it lingers over bytes that the other end does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (unread, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&sender, Some(Duration::from_secs(86_400))).unwrap();
    (sender.into(), unread)
}

#[test]
fn a_descriptor_whose_close_blocks_holds_nobody_up() {
    let (node, innocent) = stage();
    let pid = Pid::from_raw(node.pid() as i32).unwrap();
    let mut unread = Vec::new();
    // More than any frame may have, too: the kernel would close those for which the node has no room.
    for (after_hello, descriptors) in [false, true].into_iter().flat_map(|after| [(after, 1), (after, 200)]) {
        let mut session = RawSession::connect(&node.socket("default")).unwrap();
        if after_hello {
            session.ask(&hello()).unwrap();
        }
        let (lingers, other_end) = lingering();
        unread.push(other_end);
        let sent = vec![lingers.as_fd(); descriptors];
        let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(descriptors))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        let header = FrameHeader { payload_bytes: 16, descriptors: 1, request: 9 }.encode();
        // The node stands still until this process has closed the descriptor: so the node's is the last.
        kill_process(pid, Signal::STOP).unwrap();
        let bytes = [IoSlice::new(&header), IoSlice::new(&[0; 16])];
        sendmsg(session.socket(), &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
        drop(lingers);
        kill_process(pid, Signal::CONT).unwrap();
        let (code, _) = last_words(&mut session).expect("the node says why");
        assert_eq!(code, RefusalCode::Protocol);
        drop(session);
        // New sessions come through the thread that accepts, requests through the actor's.
        assert_eq!(Engine::connect(&node.socket("default")).get(&prompt(b'a', 4)), 4);
    }
    nothing_happened(&node, &innocent);
}

#[test]
fn messages_out_of_order_are_refused() {
    let (node, innocent) = stage();
    let mut early = RawSession::connect(&node.socket("default")).unwrap();
    early.send(&register(BLOCK_BYTES as u64)).unwrap();
    assert_eq!(
        last_words(&mut early),
        Some((RefusalCode::Protocol, "a session must start with a hello".into()))
    );
    let mut twice = RawSession::connect(&node.socket("default")).unwrap();
    twice.ask(&hello()).unwrap();
    twice.send(&hello()).unwrap();
    assert_eq!(last_words(&mut twice), Some((RefusalCode::Protocol, "a session has only one hello".into())));
    let mut windbag = RawSession::connect(&node.socket("default")).unwrap();
    let name = Hello { version: SESSION_VERSION, client: "x".repeat(1_000), device: None, window_bytes: 0 };
    windbag.send(&Request::Hello(name)).unwrap();
    assert_eq!(last_words(&mut windbag).unwrap().1, "a client's name has at most 256 bytes");
    let (mut namer, ..) = RawSession::open(&node.socket("default")).unwrap();
    namer.send(&Request::Name("x".repeat(257))).unwrap();
    assert_eq!(last_words(&mut namer).unwrap().1, "the name of a request is too long");
    let mut future = RawSession::connect(&node.socket("default")).unwrap();
    let next = Hello { version: SESSION_VERSION + 1, client: "x".into(), device: None, window_bytes: 0 };
    future.send(&Request::Hello(next)).unwrap();
    let (code, text) = last_words(&mut future).unwrap();
    assert_eq!(code, RefusalCode::Version);
    assert!(text.contains("upgrade the earlier one"), "{text}");
    nothing_happened(&node, &innocent);
}

#[test]
fn refused_requests_leave_the_session_open() {
    let (node, innocent) = stage();
    let (mut session, registered, _window) = RawSession::open(&node.socket("default")).unwrap();
    let refused = |session: &mut RawSession, request: &Request| match session.ask(request).unwrap().0 {
        Response::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    };
    // The engine's blocks have another size than in its namespace.
    let refusal = refused(&mut session, &register(BLOCK_BYTES as u64 / 2));
    assert_eq!(refusal.code, RefusalCode::Namespace);
    assert!(
        refusal.message.contains("2048 bytes, but 1 layers of 4096 bytes make 4096"),
        "{}",
        refusal.message
    );
    // A hash that is cached after another parent.
    let [first, .., last] = prompt(b'a', 4)[..] else { unreachable!() };
    let lease = |hashes: Vec<ChunkHash>| {
        let chain = Chain::from_root(registered.root, hashes);
        Request::Lease(Lease { namespace: registered.namespace, chain })
    };
    let refusal = refused(&mut session, &lease(vec![first, last]));
    assert_eq!(refusal.code, RefusalCode::Chain);
    assert!(refusal.message.contains("is known as number 3 after"), "{}", refusal.message);
    assert_eq!(refused(&mut session, &lease(vec![first, first])).code, RefusalCode::Chain);
    // Numbers that belong to no session, or to another.
    assert_eq!(refused(&mut session, &Request::Unpin(77)).code, RefusalCode::Unknown);
    assert_eq!(refused(&mut session, &Request::Abort(77)).code, RefusalCode::Unknown);
    assert_eq!(refused(&mut session, &commit(77, 1)).code, RefusalCode::Unknown);
    // Blocks outside the window.
    let Response::Reserved(reserved) = session.ask(&reserve(&registered, &prompt(b'c', 1))).unwrap().0 else {
        panic!("there is room")
    };
    let Request::Commit(mut outside) = commit(reserved.reservation, 1) else { unreachable!() };
    outside.sources = vec![(1 << 20) - 1];
    assert_eq!(refused(&mut session, &Request::Commit(outside)).code, RefusalCode::Place);
    assert_eq!(session.ask(&commit(reserved.reservation, 1)).unwrap().0, Response::Committed(1));
    nothing_happened(&node, &innocent);
}

#[test]
fn an_engine_that_dies_in_the_middle_of_a_write_leaves_nothing() {
    let (node, innocent) = stage();
    for deed in ["write", "commit"] {
        let used = node.status("used_bytes");
        let engine = EngineProcess::start(ENGINE, &node.socket("default"), deed).unwrap();
        engine.kill().unwrap();
        node.wait_for("sessions", 1);
        assert_eq!(node.status("reservations"), 0);
        if deed == "write" {
            node.wait_for("used_bytes", used);
            assert_eq!(innocent.find(&prompt(b'w', 4), 1_000), 0, "nothing uncommitted is ever found");
        }
    }
    assert_eq!(node.status("quarantined_bytes"), 0);
    nothing_happened(&node, &innocent);
}

#[test]
fn an_engine_that_dies_with_a_lease_frees_it_with_its_exit() {
    let (node, innocent) = stage();
    let engine = EngineProcess::start(ENGINE, &node.socket("default"), "lease").unwrap();
    assert_eq!(node.status("leases"), 1);
    engine.kill().unwrap();
    node.wait_for("leases", 0);
    node.wait_for("quarantined_bytes", 0);
    node.wait_for("lingering_processes", 0);
    nothing_happened(&node, &innocent);
}

#[test]
fn engines_that_die_while_the_node_greets_them_do_not_linger() {
    let (node, innocent) = stage();
    let ended = || -> u64 {
        let metrics = node.get("/metrics").unwrap();
        let ends = metrics.lines().filter(|line| line.starts_with("larder_session_ends_total{"));
        ends.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    };
    for round in 1..=10 {
        drop(EngineProcess::start(ENGINE, &node.socket("default"), "greet and go").unwrap());
        wait::until("the session ends", || (ended() == round).then_some(()));
    }
    node.wait_for("lingering_processes", 0);
    nothing_happened(&node, &innocent);
}

#[test]
fn an_engine_that_dies_with_a_pin_leaves_the_pin_to_its_deadline() {
    let (node, innocent) = stage();
    let engine = EngineProcess::start(ENGINE, &node.socket("default"), "pin").unwrap();
    engine.kill().unwrap();
    node.wait_for("sessions", 1);
    assert_eq!(node.status("pins"), 1);
    assert_eq!(node.status("pinned_bytes"), 4 * BLOCK_BYTES as u64);
    nothing_happened(&node, &innocent);
}

#[test]
fn memory_that_an_engine_keeps_after_closing_its_session_is_not_reused_until_it_exits() {
    let (node, innocent) = stage();
    let engine = EngineProcess::start(ENGINE, &node.socket("default"), "close").unwrap();
    node.wait_for("quarantined_bytes", 4 * BLOCK_BYTES as u64);
    assert_eq!(node.status("lingering_processes"), 1);
    // More chunks than fit: all memory that may be reused is reused.
    let arena = node.status("arena_bytes") as usize;
    for round in 0..=(arena / BLOCK_BYTES / 200) as u8 {
        innocent.put(&prompt(100 + round, 200));
    }
    assert!(node.status("evictions") > 0);
    assert_eq!(node.status("quarantined_bytes"), 4 * BLOCK_BYTES as u64);
    assert_eq!(innocent.get(&prompt(b'a', 4)), 4, "what it could still read is still what it was");
    engine.kill().unwrap();
    node.wait_for("quarantined_bytes", 0);
    nothing_happened(&node, &innocent);
}

#[test]
fn a_trusted_engine_that_could_still_write_leaves_a_quarantine_until_it_exits() {
    let config = format!("trust_engines = true\n{SMALL_HOST}{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &config).unwrap();
    let innocent = Engine::connect(&node.socket("default"));
    innocent.put(&prompt(b'a', 4));
    let engine = EngineProcess::start(ENGINE, &node.socket("default"), "write and close").unwrap();
    node.wait_for("quarantined_bytes", 4 * BLOCK_BYTES as u64);
    engine.kill().unwrap();
    node.wait_for("quarantined_bytes", 0);
    nothing_happened(&node, &innocent);
}

#[test]
fn an_engine_that_takes_no_answers_is_not_asked_for_more() {
    let (node, innocent) = stage();
    let (mut session, registered, _window) = RawSession::open(&node.socket("default")).unwrap();
    session.socket().set_nonblocking(true).unwrap();
    let chain = Chain::from_root(registered.root, prompt(b'a', 4));
    let lookup = Request::Lease(Lease { namespace: registered.namespace, chain });
    // Sends until the node reads no further and the socket is full.
    let mut sent = 0_u32;
    while sent < 1_000_000 && session.send_unless_full(&lookup).unwrap() {
        sent += 1;
    }
    nothing_happened(&node, &innocent);
    // The innocent engine's releases get no answer: the last one may still be on its way.
    wait::until("no more leases than were asked for", || {
        (node.status("leases") <= u64::from(sent)).then_some(())
    });
    drop(session);
    node.wait_for("sessions", 1);
}

#[test]
fn damaged_messages_never_stop_the_node() {
    let (node, innocent) = stage();
    let mut session = RawSession::open(&node.socket("default")).unwrap().0;
    let registered = session.register().unwrap();
    let chain = Chain::from_root(registered.root, prompt(b'a', 4));
    let Request::Reserve(reserve) = reserve(&registered, &prompt(b'q', 4)) else { unreachable!() };
    let namespace = registered.namespace;
    let messages = [
        register(BLOCK_BYTES as u64),
        Request::Lease(Lease { namespace, chain: chain.clone() }),
        Request::Pin(Pin { namespace, chain, duration_ms: 1 }),
        Request::Reserve(reserve),
        commit(1, 4),
        Request::Release(1),
    ];
    let encoded: Vec<Vec<u8>> =
        messages.iter().map(|message| encode_request(message, AlignedVec::new()).to_vec()).collect();
    // A fixed seed: every run sends the same damage.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    let (mut answered, mut closed) = (0, 0);
    for round in 0..3_000 {
        let mut message = encoded[next(encoded.len())].clone();
        for _ in 0..=next(4) {
            let at = next(message.len());
            message[at] ^= 1 << next(8);
        }
        if round % 10 == 0 {
            message.truncate(next(message.len()));
        }
        let header = FrameHeader { payload_bytes: message.len() as u32, descriptors: 0, request: 7 };
        message.resize(header.padded_payload_bytes(), 0);
        let sent = session.send_bytes(&[header.encode().to_vec(), message].concat());
        // A release gets no answer: the answer to the next message shows whether the session lives on.
        let probe = Request::Unpin(u64::MAX);
        if sent.is_ok() && session.ask(&probe).is_ok() {
            answered += 1;
        } else {
            closed += 1;
            session = RawSession::open(&node.socket("default")).unwrap().0;
        }
    }
    assert!(answered > 100 && closed > 100, "{answered} answered, {closed} closed");
    nothing_happened(&node, &innocent);
}
