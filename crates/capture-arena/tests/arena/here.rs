//! What callers do at the books themselves.

use std::{thread, time::Duration};

use capture_arena::{FreeOutcome, FreeRequest, ReserveOptions};

use crate::common::*;

#[test]
fn a_little_free_is_done_here_where_nobody_is_at_the_books_and_in_order_elsewhere() {
    let arena = arena(4096);
    let (told, outcomes) = std::sync::mpsc::channel();
    let reply = |number: usize| {
        let told = told.clone();
        move |outcome: FreeOutcome| {
            told.send((number, outcome.gone.len(), thread::current().id())).unwrap();
        }
    };
    let request = |number| FreeRequest {
        client: None,
        objects: keys(&[key("a", 0)]),
        reply: Some(Box::new(reply(number))),
    };
    let batch = arena.reserve_blocking(vec![plan("a", &[512])], ReserveOptions::default()).unwrap();
    batch.publish_blocking().unwrap();
    let busy = keep_busy(&arena);
    arena.free_here(request(0));
    arena.free(request(1));
    arena.free_here(request(2));
    assert!(outcomes.try_recv().is_err(), "somebody else is at the books");
    drop(busy);
    for (number, gone) in [(0, 0), (1, 1), (2, 1)] {
        let found = outcomes.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!((found.0, found.1), (number, gone));
    }
    // The owner thread leaves the books soon.
    let here = (0..10_000).any(|_| {
        thread::sleep(Duration::from_micros(100));
        arena.free_here(request(3));
        let told = outcomes.try_recv().ok();
        told.is_some_and(|(_, _, by)| by == thread::current().id())
    });
    assert!(here, "always done elsewhere");
    arena.close();
    arena.free_here(request(4));
    assert!(!outcomes.try_iter().any(|(number, ..)| number == 4), "dropped without a call");
    assert_eq!(arena.backlog_bytes(), 0);
}
