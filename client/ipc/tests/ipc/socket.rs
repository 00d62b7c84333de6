//! Frames and descriptors on a socket.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use larder_ipc::socket::{FrameReader, FrameWriter, ReceiveError};
use larder_protocol::frame::{FrameError, FrameHeader};
use larder_protocol::limits::{MAX_FRAME_BYTES, MAX_FRAME_DESCRIPTORS};
use larder_protocol::session::{
    Hello, Refusal, RefusalCode, Request, Response, decode_request, decode_response,
};
use proptest::prelude::*;
use proptest::sample::Index;
use rkyv::util::AlignedVec;
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};

/// A descriptor that can be told from others by `identity`.
fn descriptor(identity: usize) -> OwnedFd {
    let file = memfd_create("larder-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, identity as u64).unwrap();
    file
}

fn identities(descriptors: &[OwnedFd]) -> Vec<usize> {
    descriptors.iter().map(|file| fstat(file).unwrap().st_size as usize).collect()
}

/// The descriptors of frame `number`: `count` descriptors, each with a different identity.
fn descriptors(number: usize, count: usize) -> Vec<OwnedFd> {
    (0..count).map(|i| descriptor(number * 1_000 + i)).collect()
}

fn message(bytes: usize) -> Request {
    Request::Hello(Hello { version: 1, client: "x".repeat(bytes), device: None, window_bytes: 0 })
}

/// The bytes of a frame, and no more.
fn frame(number: usize, bytes: usize, descriptors: usize) -> Vec<u8> {
    let payload = larder_protocol::session::encode_request(&message(bytes), AlignedVec::new());
    let header = FrameHeader {
        payload_bytes: payload.len() as u32,
        descriptors: descriptors as u16,
        request: number as u64,
    };
    let mut frame = header.encode().to_vec();
    frame.extend_from_slice(&payload);
    frame.resize(16 + header.padded_payload_bytes(), 0);
    frame
}

/// Sends bytes with descriptors in one `sendmsg`.
fn send_with(socket: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(200))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, bytes.len());
}

/// The known facts of a received frame: number, length of its text, identities of its descriptors.
type Taken = (usize, usize, Vec<usize>);

/// Takes all frames that are here. `text` decodes a payload to the length of its text.
fn take_frames(reader: &mut FrameReader, taken: &mut Vec<Taken>, text: fn(&[u8]) -> usize) {
    while let Some(frame) = reader.next_frame().unwrap() {
        assert_eq!(frame.payload.as_ptr() as usize % 16, 0);
        taken.push((frame.header.request as usize, text(frame.payload), identities(&frame.descriptors)));
    }
}

fn request_text(payload: &[u8]) -> usize {
    let Ok(Request::Hello(hello)) = decode_request(payload) else { panic!("not what was sent") };
    hello.client.len()
}

fn response_text(payload: &[u8]) -> usize {
    let Ok(Response::Refused(refusal)) = decode_response(payload) else { panic!("not what was sent") };
    refusal.message.len()
}

fn expected(frames: &[(usize, usize)]) -> Vec<Taken> {
    let identities = |number: usize, count: usize| (0..count).map(|i| number * 1_000 + i).collect();
    let frames = frames.iter().enumerate();
    frames.map(|(number, &(length, count))| (number, length, identities(number, count))).collect()
}

/// Frames by length of their text and number of descriptors.
fn frames() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let length = prop_oneof![4 => 0..200_usize, 1 => 0..40_000_usize];
    let count = prop_oneof![3 => Just(0_usize), 2 => 1..4_usize, 1 => Just(40_usize)];
    prop::collection::vec((length, count), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn descriptors_reach_the_frame_that_announces_them_however_the_stream_is_cut(
        frames in frames(),
        cuts in prop::collection::vec(any::<Index>(), 0..60),
        receive in prop::collection::vec(any::<bool>(), 60),
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        sockopt::set_socket_send_buffer_size(&ours, 4 << 20).unwrap();
        let (mut bytes, mut starts) = (Vec::new(), Vec::new());
        for (number, &(length, count)) in frames.iter().enumerate() {
            starts.push((bytes.len(), number, count));
            bytes.extend(frame(number, length, count));
        }
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        cuts.extend(starts.iter().filter(|&&(_, _, count)| count > 0).map(|&(start, _, _)| start));
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        let (mut reader, mut taken) = (FrameReader::new(), Vec::new());
        for (i, piece) in cuts.windows(2).enumerate() {
            let begun = starts.iter().find(|&&(start, _, _)| start == piece[0]);
            let sent = begun.map_or_else(Vec::new, |&(_, number, count)| descriptors(number, count));
            send_with(&ours, &bytes[piece[0]..piece[1]], &sent);
            if receive[i % receive.len()] {
                reader.receive_now(theirs.as_fd()).unwrap();
                take_frames(&mut reader, &mut taken, request_text);
            }
        }
        while reader.receive_now(theirs.as_fd()).is_ok() {
            take_frames(&mut reader, &mut taken, request_text);
        }
        prop_assert_eq!(taken, expected(&frames));
    }

    #[test]
    fn a_writer_whose_socket_is_full_goes_on_where_it_stopped(
        frames in frames(),
        flush in prop::collection::vec(any::<bool>(), 24),
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        sockopt::set_socket_send_buffer_size(&ours, 4_608).unwrap();
        let (mut writer, mut reader, mut taken) = (FrameWriter::new(), FrameReader::new(), Vec::new());
        for (number, &(length, count)) in frames.iter().enumerate() {
            let message = "x".repeat(length);
            let response = Response::Refused(Refusal { code: RefusalCode::Internal, message });
            writer.push_response(number as u64, &response, descriptors(number, count)).unwrap();
            if flush[number % flush.len()] {
                writer.flush(ours.as_fd()).unwrap();
            }
        }
        while !writer.flush(ours.as_fd()).unwrap() {
            prop_assert!(writer.pending_bytes() > 0);
            reader.receive_now(theirs.as_fd()).unwrap();
            take_frames(&mut reader, &mut taken, response_text);
        }
        prop_assert_eq!(writer.pending_bytes(), 0);
        while reader.receive_now(theirs.as_fd()).is_ok() {
            take_frames(&mut reader, &mut taken, response_text);
        }
        prop_assert_eq!(taken, expected(&frames));
    }
}

#[test]
fn descriptors_that_no_frame_announces_are_noticed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut reader = FrameReader::new();
    send_with(&ours, &frame(1, 10, 0), &descriptors(1, 2));
    reader.receive(theirs.as_fd()).unwrap();
    assert!(reader.next_frame().unwrap().is_some());
    assert_eq!(reader.next_frame().unwrap_err(), ReceiveError::StrayDescriptors { found: 2 });
}

#[test]
fn a_frame_without_the_descriptors_it_announces_is_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut reader = FrameReader::new();
    // The descriptors come with the second frame, which does not announce them.
    send_with(&ours, &frame(1, 10, 2), &[]);
    reader.receive(theirs.as_fd()).unwrap();
    send_with(&ours, &frame(2, 10, 0), &descriptors(2, 2));
    reader.receive(theirs.as_fd()).unwrap();
    let error = reader.next_frame().unwrap_err();
    assert_eq!(error, ReceiveError::WrongDescriptors { announced: 2, found: 0 });
}

#[test]
fn a_frame_with_fewer_descriptors_than_it_announces_is_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut reader = FrameReader::new();
    send_with(&ours, &frame(1, 10, 3), &descriptors(1, 2));
    reader.receive(theirs.as_fd()).unwrap();
    let error = reader.next_frame().unwrap_err();
    assert_eq!(error, ReceiveError::WrongDescriptors { announced: 3, found: 2 });
}

#[test]
fn more_descriptors_than_a_frame_may_have_are_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    send_with(&ours, &frame(1, 10, 1), &descriptors(1, 150));
    // They are received all the same: the kernel would close the others on this thread, and a close may block.
    let mut reader = FrameReader::new();
    reader.receive(theirs.as_fd()).unwrap();
    let error = reader.next_frame().unwrap_err();
    assert_eq!(error, ReceiveError::WrongDescriptors { announced: 1, found: 150 });
    assert_eq!(reader.take_unclaimed().len(), 150);
    let too_many = descriptors(1, MAX_FRAME_DESCRIPTORS + 1);
    let pushed = FrameWriter::new().push_response(1, &Response::Aborted, too_many);
    assert_eq!(pushed, Err(FrameError::TooManyDescriptors { descriptors: 129 }));
}

#[test]
fn descriptors_that_pile_up_within_a_frame_are_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut reader = FrameReader::new();
    let bytes = frame(1, 100, 0);
    let mut refused = false;
    for (i, byte) in bytes[..6].chunks(1).enumerate() {
        send_with(&ours, byte, &descriptors(i, 100));
        refused |= reader.receive(theirs.as_fd()).is_err();
    }
    assert!(refused);
}

#[test]
fn the_largest_frame_passes_and_a_larger_one_is_not_sent() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut writer, mut reader) = (FrameWriter::new(), FrameReader::new());
    let overhead = frame(1, 1_000, 0).len() - 1_000;
    writer.push_request(1, &message(MAX_FRAME_BYTES - overhead)).unwrap();
    let pending = writer.pending_bytes();
    let refused = writer.push_request(2, &message(MAX_FRAME_BYTES));
    assert!(matches!(refused, Err(FrameError::TooLong { .. })));
    assert_eq!(writer.pending_bytes(), pending);
    let mut taken = Vec::new();
    while !writer.flush(ours.as_fd()).unwrap() {
        reader.receive_now(theirs.as_fd()).unwrap();
        take_frames(&mut reader, &mut taken, request_text);
    }
    drop(ours);
    while reader.receive(theirs.as_fd()).unwrap() > 0 {
        take_frames(&mut reader, &mut taken, request_text);
    }
    assert_eq!(taken, [(1, MAX_FRAME_BYTES - overhead, Vec::new())]);
}

#[test]
fn received_descriptors_are_closed_on_exec() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut reader = FrameReader::new();
    send_with(&ours, &frame(1, 10, 1), &descriptors(1, 1));
    reader.receive(theirs.as_fd()).unwrap();
    let frame = reader.next_frame().unwrap().unwrap();
    let flags = rustix::io::fcntl_getfd(&frame.descriptors[0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn bytes_that_are_no_frame_are_refused() {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut reader = FrameReader::new();
    ours.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    reader.receive(theirs.as_fd()).unwrap();
    assert_eq!(reader.next_frame().unwrap_err(), ReceiveError::Frame(FrameError::NotAFrame));
}
