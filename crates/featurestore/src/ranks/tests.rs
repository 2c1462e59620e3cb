use std::{io::Write, thread};

use super::*;

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn options(size: usize) -> GroupOptions {
    GroupOptions::new("run", size).deadline(Duration::from_secs(10))
}

/// Runs `work` on every rank of a group, each on a thread of its own.
fn group<T: Send + 'static>(
    size: usize,
    work: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let (listener, address) = listener();
    let others: Vec<_> = (1..size)
        .map(|rank| {
            let work = work.clone();
            thread::spawn(move || work(Group::join(address, rank, options(size)).unwrap()))
        })
        .collect();
    let mut results = vec![work(Group::lead(listener, options(size)).unwrap())];
    results.extend(others.into_iter().map(|t| t.join().unwrap()));
    results
}

#[test]
fn every_rank_gets_every_part_in_order() {
    for size in [1, 2, 8] {
        let results = group(size, |mut group| {
            let mut seen = Vec::new();
            for round in 0..20_u32 {
                let own = format!("{round}:{}", group.rank()).repeat(group.rank() + 1);
                seen.push(group.all_gather(own.as_bytes()).unwrap());
            }
            group.barrier().unwrap();
            seen
        });
        assert!(results.iter().all(|seen| *seen == results[0]));
        assert_eq!(results[0][3].len(), size);
        assert_eq!(results[0][3][size - 1], format!("3:{}", size - 1).repeat(size).as_bytes());
    }
}

#[test]
fn the_leader_decides_and_its_refusal_reaches_all_and_breaks_nothing() {
    let results = group(3, |mut group| {
        let refused = group.decide(b"x", |_| {
            Err(Error::new(ErrorKind::CapacityExceeded, "ledger", "the disk is full"))
        });
        let decided = group.decide(&[group.rank() as u8], |all| Ok(all.concat())).unwrap();
        (refused.unwrap_err().to_string(), decided)
    });
    for (refused, decided) in results {
        assert!(refused.contains("the disk is full"), "{refused}");
        assert_eq!(decided, [0, 1, 2]);
    }
}

#[test]
fn a_rank_that_dies_fails_the_call_on_all_others_soon() {
    let results = group(4, |mut group| {
        group.barrier().unwrap();
        if group.rank() == 2 {
            return None; // its links close
        }
        let start = Instant::now();
        let error = group.barrier().unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(5));
        let again = group.barrier().unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Closed, "{again}");
        Some(error.to_string())
    });
    for (rank, error) in results.into_iter().enumerate() {
        assert_eq!(error.is_none(), rank == 2);
        assert!(error.is_none_or(|e| e.contains("gone")), "rank {rank}");
    }
}

#[test]
fn a_rank_that_is_late_fails_the_call_within_the_deadline() {
    let (listener, address) = listener();
    let short = GroupOptions::new("run", 2).deadline(Duration::from_millis(300));
    let joining = short.clone();
    let other = thread::spawn(move || {
        let group = Group::join(address, 1, joining).unwrap();
        thread::sleep(Duration::from_millis(800));
        drop(group);
    });
    let mut leader = Group::lead(listener, short).unwrap();
    let error = leader.barrier().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(error.context("rank"), Some("1"));
    other.join().unwrap();
}

#[test]
fn strangers_are_refused_and_hold_nobody_up() {
    let (listener, address) = listener();
    let leading = {
        let options = GroupOptions { token: Some(Secret::new("right").unwrap()), ..options(2) };
        thread::spawn(move || Group::lead(listener, options).map(|group| group.size()))
    };
    let mut silent = TcpStream::connect(address).unwrap();
    silent.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    for (run, size, token) in
        [("run", 2, Some("wrong")), ("run", 2, None), ("other", 2, Some("right")), ("run", 3, None)]
    {
        let token = token.map(|token| Secret::new(token).unwrap());
        let options = GroupOptions { token, ..GroupOptions::new(run, size) };
        let error = Group::join(address, 1, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(!format!("{error} {error:?}").contains("right"), "{error}");
    }
    let token = Some(Secret::new("right").unwrap());
    Group::join(address, 1, GroupOptions { token, ..options(2) }).unwrap();
    assert_eq!(leading.join().unwrap().unwrap(), 2);
    assert!(Group::join(address, 0, options(2)).is_err());
    assert!(Group::join(address, 2, options(2)).is_err());
}

#[test]
fn missing_ranks_are_named() {
    let (listener, _) = listener();
    let options = GroupOptions::new("run", 3).deadline(Duration::from_millis(50));
    let error = Group::lead(listener, options).unwrap_err();
    assert_eq!(error.context("missing"), Some("1,2"), "{error}");
}

#[test]
fn d19_a_connection_that_is_reset_is_made_again() {
    let (first, address) = listener();
    let joining = thread::spawn(move || Group::join(address, 1, options(2)).map(|g| g.rank()));
    // A leader that dies with the connection: unread bytes make the kernel reset it.
    let (stream, _) = first.accept().unwrap();
    stream.peek(&mut [0; 1]).unwrap();
    drop((stream, first));
    let listener = loop {
        match TcpListener::bind(address) {
            Ok(listener) => break listener,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    Group::lead(listener, options(2)).unwrap();
    assert_eq!(joining.join().unwrap().unwrap(), 1);
}
