//! One request together with what its answer means: the same for both kinds of session.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::handoff::{self, AskInPlace, Writer};
use larder_protocol::session::{
    Busy, Checked, Collect, Commit, Found, Lease, Lookup, Pin, Pinned, Progress, Register, ReportDamage,
    Request, Reserve, Response, Wait,
};
use larder_protocol::{Chain, ChunkHash, NamespaceSpec, PoolSet};

use crate::error::SessionError;
use crate::follow::{Follow, FollowOptions, InPlace, News};
use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::namespace::Namespace;
use crate::options::{LookupOptions, millis};
use crate::reservation::{CommitPart, LayersPart, Reservation};
use crate::ticket::Ticket;

/// A request, and how to turn its answer into a result.
pub(crate) struct Exchange<T> {
    pub(crate) request: Request,
    pub(crate) accept: Accept<T>,
    /// What goes along with the request.
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl<T> Exchange<T> {
    pub(crate) fn new(request: Request, accept: Accept<T>) -> Self {
        Self { request, accept, descriptors: Vec::new() }
    }
}

/// Turns an answer that is neither `Busy` nor `Refused` into a result. What the result grants it gives back when it is
/// dropped, so an answer that nobody waits for leaks nothing.
pub(crate) type Accept<T> =
    Box<dyn FnOnce(&Arc<Link>, Response, Vec<OwnedFd>) -> Result<T, SessionError> + Send>;

/// A result with a pin that ends unless somebody keeps it.
pub(crate) struct Pinning<T> {
    result: T,
    pin: PinOnTheWay,
}

struct PinOnTheWay {
    link: Arc<Link>,
    /// 0 where there is none.
    pin: u64,
}

/// Takes apart the answers that any request may get.
pub(crate) fn granted(response: Response) -> Result<Response, SessionError> {
    match response {
        Response::Busy(Busy { what, retry_after_ms }) => {
            Err(SessionError::Busy { what, retry_after: Duration::from_millis(retry_after_ms) })
        }
        Response::Refused(refusal) => Err(SessionError::Refused(refusal)),
        response => Ok(response),
    }
}

pub(crate) fn register(spec: &NamespaceSpec, slices: &[u16], block_bytes: &[u64]) -> Exchange<Namespace> {
    let asked = Register { spec: spec.clone(), slices: slices.to_vec(), block_bytes: block_bytes.to_vec() };
    Exchange {
        descriptors: Vec::new(),
        request: Request::Register(asked.clone()),
        accept: Box::new(move |_, response, _| match response {
            Response::Registered(_)
                if asked.slices.is_empty()
                    || asked.block_bytes.is_empty()
                    || asked.block_bytes.len() != asked.spec.pools.len() =>
            {
                Err(SessionError::wrong_answer(
                    "a namespace has a slice, a pool, and a block size of each pool",
                ))
            }
            Response::Registered(registered) => Ok(Namespace::new(&registered, &asked)),
            _ => Err(SessionError::wrong_answer("a namespace is registered")),
        }),
    }
}

pub(crate) fn lookup(
    namespace: &Namespace,
    chain: &Chain,
    options: LookupOptions,
) -> Result<Exchange<Pinning<Found>>, SessionError> {
    let request = Request::Lookup(lookup_message(namespace, chain, options)?);
    let asked = chain.len() as u64;
    let most_tokens = asked * u64::from(namespace.chunk_tokens());
    let accept: Accept<_> = Box::new(move |link, response, _| match response {
        Response::Found(Found { tokens, spans, .. })
            if tokens > most_tokens || spans.iter().any(|span| u64::from(span.to) > asked) =>
        {
            Err(SessionError::wrong_answer("a lookup finds chunks that were asked for"))
        }
        Response::Found(found) => Ok(Pinning::new(link, found.pin.unwrap_or(0), found)),
        _ => Err(SessionError::wrong_answer("a lookup finds")),
    });
    Ok(Exchange::new(request, accept))
}

fn lookup_message(
    namespace: &Namespace,
    chain: &Chain,
    options: LookupOptions,
) -> Result<Lookup, SessionError> {
    chain.check(namespace.root(), namespace.is_flat())?;
    let LookupOptions { prompt_tokens, skip_read, preempted, tiers, pin, prefill_tokens_per_second } =
        options;
    Ok(Lookup {
        namespace: namespace.number(),
        chain: chain.clone(),
        prompt_tokens,
        skip_read,
        preempted,
        tiers,
        pin_ms: pin.map(millis),
        prefill_tokens_per_second,
    })
}

pub(crate) fn prefetch(
    namespace: &Namespace,
    chain: &Chain,
    options: LookupOptions,
) -> Result<Exchange<Pinning<Ticket>>, SessionError> {
    let request = Request::Prefetch(lookup_message(namespace, chain, options)?);
    let (namespace, asked) = (namespace.clone(), chain.hashes.as_slice().into());
    let accept: Accept<_> = Box::new(move |link, response, _| match response {
        Response::Prefetching(prefetching) => {
            let ticket = Ticket::accept(link, namespace, asked, prefetching)?;
            Ok(Pinning::new(link, ticket.found().pin.unwrap_or(0), ticket))
        }
        _ => Err(SessionError::wrong_answer("a prefetch begins")),
    });
    Ok(Exchange::new(request, accept))
}

pub(crate) fn progress(ticket: &Ticket) -> Exchange<Progress> {
    Exchange {
        descriptors: Vec::new(),
        request: Request::Progress(ticket.number()),
        accept: Box::new(|_, response, _| match response {
            Response::Progress(progress) => Ok(progress),
            _ => Err(SessionError::wrong_answer("a ticket has progress")),
        }),
    }
}

pub(crate) fn collect(ticket: &Ticket, wait: Wait) -> Exchange<LeaseGuard> {
    let (namespace, asked) = (ticket.namespace().clone(), Arc::clone(ticket.chunks()));
    Exchange {
        descriptors: Vec::new(),
        request: Request::Collect(Collect { ticket: ticket.number(), wait }),
        accept: Box::new(move |link, response, descriptors| match response {
            Response::Leased(leased) => LeaseGuard::accept(link, namespace, &asked, leased, &descriptors),
            _ => Err(SessionError::wrong_answer("a ticket is collected as a lease")),
        }),
    }
}

pub(crate) fn lease(namespace: &Namespace, chain: &Chain) -> Result<Exchange<LeaseGuard>, SessionError> {
    chain.check(namespace.root(), namespace.is_flat())?;
    let request = Request::Lease(Lease { namespace: namespace.number(), chain: chain.clone() });
    let (namespace, asked) = (namespace.clone(), chain.hashes.clone());
    let accept: Accept<_> = Box::new(move |link, response, descriptors| match response {
        Response::Leased(leased) => LeaseGuard::accept(link, namespace, &asked, leased, &descriptors),
        _ => Err(SessionError::wrong_answer("a lease leases")),
    });
    Ok(Exchange::new(request, accept))
}

pub(crate) fn reserve(
    namespace: &Namespace,
    chain: &Chain,
    pools: &[PoolSet],
    priority: i8,
    attempt: u64,
) -> Result<Exchange<Reservation>, SessionError> {
    chain.check(namespace.root(), namespace.is_flat())?;
    let (namespace_number, chain_asked, pools) = (namespace.number(), chain.clone(), pools.to_vec());
    let request = Request::Reserve(Reserve {
        namespace: namespace_number,
        chain: chain_asked,
        priority,
        pools,
        attempt,
    });
    let (namespace, asked) = (namespace.clone(), chain.len());
    let accept: Accept<_> = Box::new(move |link, response, descriptors| match response {
        Response::Reserved(reserved) => Reservation::accept(link, namespace, asked, reserved, &descriptors),
        _ => Err(SessionError::wrong_answer("a reservation reserves")),
    });
    Ok(Exchange::new(request, accept))
}

pub(crate) fn commit(part: CommitPart) -> Exchange<u32> {
    let CommitPart { reservation, chunks, ranges, sources, remaining } = part;
    let committed = chunks.len();
    Exchange {
        descriptors: Vec::new(),
        request: Request::Commit(Commit { reservation, chunks, sources }),
        accept: Box::new(move |_, response, _| {
            // The node copies from the window until it answers.
            drop(ranges);
            match response {
                Response::Committed(chunks) if chunks as usize <= committed => {
                    remaining.settle(committed);
                    Ok(chunks)
                }
                _ => Err(SessionError::wrong_answer("a commit commits chunks that were named")),
            }
        }),
    }
}

pub(crate) fn hand_over(part: LayersPart) -> Exchange<()> {
    let LayersPart { request, range } = part;
    Exchange {
        descriptors: Vec::new(),
        request: Request::HandOver(request),
        accept: Box::new(move |_, response, _| {
            // The node copies from the window until it answers.
            drop(range);
            match response {
                Response::HandedOver => Ok(()),
                _ => Err(SessionError::wrong_answer("layers are handed over")),
            }
        }),
    }
}

pub(crate) fn follow(
    namespace: &Namespace,
    chain: &Chain,
    options: FollowOptions,
) -> Result<Exchange<Follow>, SessionError> {
    chain.check(namespace.root(), namespace.is_flat())?;
    let FollowOptions { writer, attempt, patience } = options;
    let writer = writer.map(|(node, device)| Writer { node, device });
    let request = Request::Follow(handoff::Follow {
        namespace: namespace.number(),
        chain: chain.clone(),
        writer,
        attempt,
        patience_ms: millis(patience),
    });
    let (namespace, asked) = (namespace.clone(), chain.hashes.as_slice().into());
    let accept: Accept<_> = Box::new(move |link, response, _| match response {
        Response::Following(number) if number != 0 => Ok(Follow::new(link, namespace, asked, number)),
        _ => Err(SessionError::wrong_answer("a follow follows")),
    });
    Ok(Exchange::new(request, accept))
}

/// Asks for news of a follow; its lease comes along when there is one.
pub(crate) fn in_place(follow: &Follow, known: InPlace, wait: Duration) -> Exchange<News> {
    let (namespace, asked) = (follow.namespace().clone(), Arc::clone(follow.hashes()));
    let request = AskInPlace {
        follow: follow.number(),
        chunks: known.chunks,
        layers: known.layers,
        wait_ms: millis(wait),
    };
    Exchange {
        descriptors: Vec::new(),
        request: Request::AskInPlace(request),
        accept: Box::new(move |link, response, descriptors| {
            let Response::InPlace(news) = response else {
                return Err(SessionError::wrong_answer("a follow has layers in place"));
            };
            let handoff::InPlace { chunks, layers, is_whole, leased, sums, checksums } = news;
            if chunks as usize > asked.len() {
                return Err(SessionError::wrong_answer("a follow has chunks that were asked for"));
            }
            let accept = |leased| LeaseGuard::accept_followed(link, namespace, &asked, leased, &descriptors);
            let lease = leased.map(accept).transpose()?;
            Ok(News { in_place: InPlace { chunks, layers, is_whole }, lease, sums, checksums })
        }),
    }
}

pub(crate) fn pin(
    namespace: &Namespace,
    chain: &Chain,
    duration: Duration,
) -> Result<Exchange<Pinning<Pinned>>, SessionError> {
    chain.check(namespace.root(), namespace.is_flat())?;
    let request = Request::Pin(Pin {
        namespace: namespace.number(),
        chain: chain.clone(),
        duration_ms: millis(duration),
    });
    let asked = chain.len();
    let accept: Accept<_> = Box::new(move |link, response, _| match response {
        Response::Pinned(pinned) if pinned.chunks as usize <= asked => {
            Ok(Pinning::new(link, pinned.pin, pinned))
        }
        _ => Err(SessionError::wrong_answer("a pin pins chunks that were asked for")),
    });
    Ok(Exchange::new(request, accept))
}

pub(crate) fn unpin(pin: u64) -> Exchange<()> {
    Exchange {
        descriptors: Vec::new(),
        request: Request::Unpin(pin),
        accept: Box::new(|_, response, _| match response {
            Response::Unpinned => Ok(()),
            _ => Err(SessionError::wrong_answer("an unpin unpins")),
        }),
    }
}

pub(crate) fn report_damage(namespace: &Namespace, hash: ChunkHash) -> Exchange<Checked> {
    let request = Request::ReportDamage(ReportDamage { namespace: namespace.number(), hash });
    let accept: Accept<_> = Box::new(|_, response, _| match response {
        Response::Checked(checked) => Ok(checked),
        _ => Err(SessionError::wrong_answer("a chunk that is reported is checked")),
    });
    Exchange::new(request, accept)
}

impl<T> Pinning<T> {
    fn new(link: &Arc<Link>, pin: u64, result: T) -> Self {
        Self { result, pin: PinOnTheWay { link: Arc::clone(link), pin } }
    }

    /// The result; its pin is the caller's from now on.
    pub(crate) fn keep(self) -> T {
        let Self { result, mut pin } = self;
        pin.pin = 0;
        result
    }
}

impl Drop for PinOnTheWay {
    fn drop(&mut self) {
        if self.pin != 0 {
            self.link.give_back(Request::Unpin(self.pin));
        }
    }
}
