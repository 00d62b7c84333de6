//! Many requests at the same time.

use std::sync::mpsc;

use larder_client::{LookupOptions, Session};
use larder_protocol::limits::MAX_OUTSTANDING_REQUESTS;
use larder_protocol::session::{Request, Response};

use crate::fake_node::{BLOCK_BYTES, SLICES, chain, found, node, options, spec};

#[tokio::test]
async fn answers_out_of_order_find_their_requests() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let mut requests = [node.next().unwrap(), node.next().unwrap()];
        requests.reverse();
        for (number, request) in requests {
            let Request::Lookup(lookup) = request else { panic!("{request:?} is no lookup") };
            node.answer(number, &found(lookup.prompt_tokens, None), Vec::new());
        }
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let (chain_a, chain_b) = (chain(1), chain(2));
    let ask = |prompt_tokens| LookupOptions { prompt_tokens, ..LookupOptions::default() };
    let (a, b) = tokio::join!(
        session.lookup(&namespace, &chain_a, ask(1)),
        session.lookup(&namespace, &chain_b, ask(2))
    );
    assert_eq!((a.unwrap().tokens, b.unwrap().tokens), (1, 2));
    node.join().unwrap();
}

#[tokio::test]
async fn requests_beyond_the_limit_wait_for_answers() {
    let (all_asked, asked) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.welcome(0, false);
        asked.recv().unwrap();
        let first = node.next().unwrap().0;
        let outstanding = 1 + node.count_now() as u64;
        for number in first..first + outstanding {
            node.answer(number, &Response::Unpinned, Vec::new());
        }
        for _ in outstanding..100 {
            node.answer_next(&Response::Unpinned, Vec::new());
        }
        outstanding
    });
    let session = Session::open(socket, options()).await.unwrap();
    let tasks: Vec<_> = (0..100)
        .map(|pin| {
            let session = session.clone();
            tokio::spawn(async move { session.unpin(pin).await })
        })
        .collect();
    // The runtime has one thread: after the yield every task has asked, or waits.
    tokio::task::yield_now().await;
    all_asked.send(()).unwrap();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    let outstanding = node.join().unwrap();
    assert!((32..=MAX_OUTSTANDING_REQUESTS as u64).contains(&outstanding), "{outstanding} were outstanding");
}

#[tokio::test]
async fn requests_larger_than_the_sockets_buffer_are_sent_by_and_by() {
    let (all_asked, asked) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        asked.recv().unwrap();
        for _ in 0..10 {
            let (number, request) = node.next().unwrap();
            let Request::Lookup(lookup) = request else { panic!("{request:?} is no lookup") };
            node.answer(number, &found(lookup.chain.len() as u64, None), Vec::new());
        }
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let hashes = (0..8_000_u32).map(|i| {
        let mut hash = chain(1).hashes[0];
        hash.0[..4].copy_from_slice(&i.to_le_bytes());
        hash
    });
    let long = namespace.chain(hashes.collect());
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let (session, namespace, long) = (session.clone(), namespace.clone(), long.clone());
            tokio::spawn(async move { session.lookup(&namespace, &long, LookupOptions::default()).await })
        })
        .collect();
    tokio::task::yield_now().await;
    all_asked.send(()).unwrap();
    for task in tasks {
        assert_eq!(task.await.unwrap().unwrap().tokens, 8_000);
    }
    node.join().unwrap();
}
