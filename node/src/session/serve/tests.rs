//! Tests of a session's loop: its answers, their order, and its end.

use std::os::unix::net::UnixStream as Engine;

use actix::{Actor, Context, Handler};
use larder_protocol::describe::Described;
use larder_protocol::session::{Commit, Response, decode_response};
use larder_protocol::{ChunkHash, Fingerprint};

use super::*;

/// Answers every request at once.
struct Prompt;

impl Actor for Prompt {
    type Context = Context<Self>;
}

impl Handler<Ask> for Prompt {
    type Result = ();

    fn handle(&mut self, Ask { reply_to: ReplyTo { number, answers, .. }, .. }: Ask, _: &mut Context<Self>) {
        let answer = Answer { response: Some(Response::Unpinned), descriptors: Vec::new() };
        answers.send((number, answer)).unwrap();
    }
}

/// Answers nothing.
struct Late;

impl Actor for Late {
    type Context = Context<Self>;
}

impl Handler<Ask> for Late {
    type Result = ();

    fn handle(&mut self, ask: Ask, _: &mut Context<Self>) {
        std::mem::forget(ask.reply_to);
    }
}

#[actix::test]
async fn the_end_of_a_session_waits_for_copies_alone() {
    let commit = Commit { reservation: 1, chunks: vec![0], sources: vec![0] };
    let cases = [(Request::Unpin(1), false), (Request::Commit(commit), true)];
    for (request, waits) in cases {
        let (ours, engine) = Engine::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut requests = FrameWriter::new();
        requests.push_request(1, &request).unwrap();
        assert!(requests.flush(engine.as_fd()).unwrap());
        drop(engine);
        let (socket, writer) = (UnixStream::from_std(ours).unwrap(), FrameWriter::new());
        let asks = Late.start().recipient();
        let mut session = Session::new(socket, FrameReader::new(), writer, SessionId(1), asks);
        let end = session.run().await;
        assert!(matches!(end, End::Closed), "{end}");
        assert_eq!(session.waiting, 1);
        let goodbye = tokio::time::timeout(Duration::from_millis(100), session.say_goodbye(&end));
        assert_eq!(goodbye.await.is_err(), waits, "{request:?}");
    }
}

#[actix::test]
async fn the_end_of_a_session_does_not_wait_for_a_copy_that_the_actor_never_began() {
    let (ours, engine) = Engine::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut requests = FrameWriter::new();
    let commit = Commit { reservation: 1, chunks: vec![0], sources: vec![0] };
    requests.push_request(1, &Request::Commit(commit)).unwrap();
    assert!(requests.flush(engine.as_fd()).unwrap());
    let (socket, writer) = (UnixStream::from_std(ours).unwrap(), FrameWriter::new());
    let asks = Late.start().recipient();
    let mut session = Session::new(socket, FrameReader::new(), writer, SessionId(1), asks);
    session.socket.readable().await.unwrap();
    // The process is gone before the actor takes the message: an actor passes over messages whose senders have gone.
    tokio::select! {
        biased;
        end = session.run() => panic!("{end}"),
        () = std::future::ready(()) => {}
    }
    assert_eq!(session.waiting, 1, "the message was sent");
    let goodbye = tokio::time::timeout(COPY_DEADLINE / 2, session.say_goodbye(&End::ProcessGone));
    assert!(goodbye.await.is_ok());
}

#[actix::test]
async fn an_engine_that_sends_messages_without_end_does_not_keep_the_thread() {
    let (ours, engine) = Engine::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let (socket, writer) = (UnixStream::from_std(ours).unwrap(), FrameWriter::new());
    let mut session =
        Session::new(socket, FrameReader::new(), writer, SessionId(1), Prompt.start().recipient());
    let floods = std::thread::spawn(move || {
        let mut messages = FrameWriter::new();
        loop {
            (0..100).for_each(|_| messages.push_request(1, &Request::Name("n".into())).unwrap());
            if messages.flush(engine.as_fd()).is_err() {
                return;
            }
        }
    });
    let serving = actix_rt::spawn(async move { session.run().await });
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    serving.abort();
    assert!(serving.await.unwrap_err().is_cancelled());
    floods.join().unwrap();
}

#[actix::test]
async fn others_run_while_an_engine_describes_many_chunks() {
    let (ours, engine) = Engine::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let chunk = |number| Described {
        blocks: vec![ChunkHash([number; 32])],
        parent: None,
        tokens: vec![1; 16],
        lora_id: None,
        lora_name: None,
        extra_keys: String::new(),
    };
    let said = Describe { fingerprint: Fingerprint([9; 32]), chunks: (0..100).map(chunk).collect() };
    let mut messages = FrameWriter::new();
    messages.push_request(1, &Request::Describe(said)).unwrap();
    assert!(messages.flush(engine.as_fd()).unwrap());
    drop(engine);
    let (socket, writer) = (UnixStream::from_std(ours).unwrap(), FrameWriter::new());
    let asks = Late.start().recipient();
    let mut session = Session::new(socket, FrameReader::new(), writer, SessionId(1), asks);
    let descriptions = Descriptions::kept(0);
    session.tells = Some(("t".into(), descriptions.clone()));
    session.socket.readable().await.unwrap();
    let turns = Cell::new(0);
    let others = async {
        loop {
            turns.update(|turns| turns + 1);
            tokio::task::yield_now().await;
        }
    };
    let end = tokio::select! {
        end = session.run() => end,
        () = others => unreachable!("it has no end"),
    };
    assert!(matches!(end, End::Closed), "{end}");
    assert_eq!(descriptions.fresh().await.len(), 100);
    assert!(turns.get() >= 100 / DESCRIBED_AT_ONCE, "{} turns", turns.get());
}

#[actix::test]
async fn requests_that_came_together_are_all_answered_though_answers_fill_the_writer_between_them() {
    let (ours, engine) = Engine::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut requests = FrameWriter::new();
    (1..=50).for_each(|number| requests.push_request(number, &Request::Unpin(number)).unwrap());
    assert!(requests.flush(engine.as_fd()).unwrap());
    let asks = Prompt.start().recipient();
    let (socket, writer) = (UnixStream::from_std(ours).unwrap(), FrameWriter::new());
    let mut session = Session::new(socket, FrameReader::new(), writer, SessionId(1), asks);
    // One answer fills the writer; the socket takes the answer at once.
    session.most_unsent_bytes = 1;
    let serving = actix_rt::spawn(async move { session.run().await });
    let read = actix_rt::task::spawn_blocking(move || {
        engine.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let (mut reader, mut answered) = (FrameReader::new(), Vec::new());
        while answered.len() < 50 && reader.receive(engine.as_fd()).is_ok_and(|bytes| bytes > 0) {
            while let Some(frame) = reader.next_frame().unwrap() {
                assert_eq!(decode_response(frame.payload).unwrap(), Response::Unpinned);
                answered.push(frame.header.request);
            }
        }
        answered
    });
    assert_eq!(read.await.unwrap(), (1..=50).collect::<Vec<u64>>());
    assert!(matches!(serving.await.unwrap(), End::Closed));
}
