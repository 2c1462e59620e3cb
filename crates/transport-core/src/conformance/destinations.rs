//! Cases about where fetched bytes go, and about memory that the caller hands in.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Pair,
    context::{
        PLAIN, Returns, Spec, Stop, Verdict, check_bytes, ensure, expect_error, expected,
        fetch_and_check, fetch_one, fetch_options, key, name, publication, publish_one,
        publish_plain, release, release_now, settled,
    },
    peers::second,
};
use crate::{
    Destination, Dtype, ErrorKind, FetchOptions, FetchRequest, Fetched, PublishOptions, RegionMut,
    ReleaseReport, Transport,
};

/// A few of these fill a small arena.
const FILLER: &[Spec<'static>] = &[("hidden_states", Dtype::Uint8, &[30_000])];

/// Big enough that its transfer cannot be over before the caller goes away.
const LARGE: &[Spec<'static>] = &[("hidden_states", Dtype::Uint8, &[16 << 20])];

pub(super) async fn views_show_the_bytes(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] =
        &[("a", Dtype::Float16, &[700]), ("none", Dtype::Int8, &[0]), ("b", Dtype::Int64, &[70])];
    let descriptor = publish_one(pair, publication(&key("view"), specs, 1)).await?;
    let request = || FetchRequest::new(descriptor.clone(), Destination::View);
    let before = pair.consumer.health().await?.host_payload_bytes;
    let first = fetch_one(&pair.consumer, request()).await?;
    let second = fetch_one(&pair.consumer, request()).await?;
    check_bytes(&first, 1)?;
    check_bytes(&second, 1)?;
    let copied = pair.consumer.health().await?.host_payload_bytes - before;
    ensure!(copied == 0, "two views copied {copied} bytes");
    for (name, tensor) in first.tensors.iter().filter(|(_, t)| !t.data.is_empty()) {
        let again = &second.tensors[name];
        ensure!(
            tensor.data.address() == again.data.address(),
            "two views of {name} lie at different addresses: one of them is a copy"
        );
    }
    drop((first, second));
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn views_are_unmoved_by_other_samples(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "kept", 1).await?;
    let request = FetchRequest::new(descriptor.clone(), Destination::View);
    let view = fetch_one(&pair.consumer, request).await?;
    for round in 0..50 {
        let other = publish_plain(pair, &format!("other {round}"), 2).await?;
        check_bytes(&view, 1)?;
        release(&pair.consumer, &[&other]).await?;
    }
    check_bytes(&view, 1)?;
    drop(view);
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn a_release_waits_for_views(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "viewed", 1).await?;
    let view = || FetchRequest::new(descriptor.clone(), Destination::View);
    let first = fetch_one(&pair.consumer, view()).await?;
    let second = fetch_one(&pair.consumer, view().names(vec![name("input_ids")])).await?;
    let report = release(&pair.consumer, &[&descriptor]).await?;
    ensure!(
        report == ReleaseReport { deferred: 1, ..ReleaseReport::default() },
        "the release of a sample with two views reports {report:?}, expected one as deferred"
    );
    drop(second);
    let health = pair.consumer.health().await?;
    ensure!(
        health.deferred_samples == 1,
        "one release waits for a view, but the consumer counts {}",
        health.deferred_samples
    );
    let report = release(&pair.consumer, &[&descriptor]).await?;
    ensure!(
        report == ReleaseReport { already_gone: 1, ..ReleaseReport::default() },
        "the second release of a sample with a view reports {report:?}"
    );
    let again = pair.consumer.fetch(vec![view()], fetch_options()).await;
    expect_error("fetching it again", again, &[ErrorKind::NotFound], &["key"])?;
    reuse_the_arena(pair, &pair.consumer, &first, 1).await?;
    let health = pair.publisher.health().await?;
    ensure!(health.resident_samples == 1, "the viewed sample does not count: {health:?}");
    drop(first);
    settled("the sample goes with its last view", &pair.publisher, |h| {
        h.resident_samples == 0 && h.arena_largest_free == h.arena_bytes
    })
    .await?;
    settled("nothing waits any more", &pair.consumer, |h| h.deferred_samples == 0).await?;
    let report = release(&pair.consumer, &[&descriptor]).await?;
    ensure!(report.already_gone == 1, "released after its last view: {report:?}");
    Ok(())
}

pub(super) async fn a_view_outlives_its_consumer(pair: &mut Pair) -> Verdict {
    if Arc::ptr_eq(&pair.publisher, &pair.consumer) {
        return Err(Stop::NotApplicable("publisher and consumer are one object".into()));
    }
    let viewed = publish_plain(pair, "viewed", 1).await?;
    let copied = publish_plain(pair, "copied", 1).await?;
    let request = FetchRequest::new(viewed.clone(), Destination::View);
    let view = fetch_one(&pair.consumer, request).await?;
    fetch_and_check(&pair.consumer, &copied, 1).await?;
    pair.consumer.close().await?;
    let second = second(pair)?;
    release(&second, &[&viewed, &copied]).await?;
    reuse_the_arena(pair, &second, &view, 1).await?;
    drop(view);
    settled("what the consumer held goes with its last view", &pair.publisher, |h| {
        h.resident_samples == 0 && h.arena_largest_free == h.arena_bytes
    })
    .await?;
    Ok(())
}

/// Publishes over every free byte of a small arena and looks at a view meanwhile, twice.
async fn reuse_the_arena(
    pair: &Pair,
    releaser: &Arc<dyn Transport>,
    view: &Fetched,
    salt: u64,
) -> Verdict {
    for round in 0..2 {
        let mut others = Vec::new();
        loop {
            let other = publication(&key(format!("{round} {}", others.len())), FILLER, salt + 1);
            let options = PublishOptions::default().deadline(Duration::from_millis(150));
            match pair.publisher.publish(vec![other], options).await {
                Ok(mut descriptors) => others.push(Arc::new(descriptors.remove(0))),
                Err(error) if error.kind() == ErrorKind::CapacityExceeded => break,
                Err(error) => return Err(error.into()),
            }
        }
        ensure!(!others.is_empty(), "a viewed sample of 1 KiB takes the whole arena");
        check_bytes(view, salt)?;
        let report = release(releaser, &others.iter().collect::<Vec<_>>()).await?;
        ensure!(report.released == others.len() as u64, "the others' release: {report:?}");
    }
    check_bytes(view, salt)
}

pub(super) async fn pool_memory_outlives_the_release(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "copied", 1).await?;
    let fetched = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await?;
    for round in 0..20 {
        let other = publish_plain(pair, &format!("other {round}"), 2).await?;
        fetch_and_check(&pair.consumer, &other, 2).await?;
        release_now(&pair.consumer, &other).await?;
    }
    check_bytes(&fetched, 1)
}

pub(super) async fn own_regions_come_back_filled(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] =
        &[("a", Dtype::Uint8, &[1000]), ("b", Dtype::Uint8, &[0]), ("c", Dtype::Int32, &[3])];
    let descriptor = publish_one(pair, publication(&key("into"), specs, 1)).await?;
    let returns = Returns::default();
    // Regions that start anywhere, not only where an allocator puts them.
    let mut regions = Vec::new();
    for feature in descriptor.features.values() {
        let whole = returns.region(feature.meta.nbytes() + 3)?;
        let (_, region) = whole.split_at(3).expect("at least 3 bytes long");
        regions.push(region);
    }
    let addresses: Vec<_> = regions.iter().map(RegionMut::address).collect();
    let request = FetchRequest::new(descriptor.clone(), Destination::Into(regions));
    let fetched = fetch_one(&pair.consumer, request).await?;
    check_bytes(&fetched, 1)?;
    for (address, (name, tensor)) in addresses.iter().zip(&fetched.tensors) {
        ensure!(
            tensor.data.is_empty() || tensor.data.address() == *address,
            "{name} came back in memory that was not handed in"
        );
    }
    release_now(&pair.consumer, &descriptor).await?;
    check_bytes(&fetched, 1)?;
    drop(fetched);
    returns.reach("after the fetched sample was dropped", 3).await
}

pub(super) async fn ranges_are_read_alone_or_refused(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] = &[("a", Dtype::Int32, &[700]), ("b", Dtype::Uint8, &[70])];
    let descriptor = publish_one(pair, publication(&key("ranges"), specs, 1)).await?;
    let whole = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let returns = Returns::default();
    let request = |ranges: &[(u64, u64)], destination| {
        let ranges = ranges.iter().map(|&(start, end)| start..end).collect();
        FetchRequest::new(descriptor.clone(), destination).names(vec![name("a")]).ranges(ranges)
    };
    if !pair.consumer.info().capabilities.ranges {
        let wanted = request(&[(0, 4)], Destination::Into(vec![returns.region(4)?]));
        let result = fetch_one(&pair.consumer, wanted).await;
        expect_error("a range", result, &[ErrorKind::Unsupported], &["sample"])?;
        returns.reach("after a refused fetch", 1).await?;
        return release_now(&pair.consumer, &descriptor).await;
    }
    let whole = whole.tensors["a"].data.as_bytes();
    let whole = whole.ok_or_else(|| Stop::Failed("not in host memory".into()))?;
    // In any order, touching, overlapping, empty, up to the end.
    for ranges in [
        &[(0, 2800)][..],
        &[(7, 8)],
        &[(2799, 2800), (0, 3), (3, 9), (5, 6), (10, 10)],
        &[(0, 0)],
        &[],
    ] {
        let expected: Vec<u8> = ranges
            .iter()
            .flat_map(|&(start, end)| &whole[start as usize..end as usize])
            .copied()
            .collect();
        let own = Destination::Into(vec![returns.region(expected.len() as u64)?]);
        for destination in [Destination::Pool, own] {
            let fetched = fetch_one(&pair.consumer, request(ranges, destination)).await?;
            let tensor = &fetched.tensors["a"];
            ensure!(
                (tensor.meta.dtype(), tensor.meta.nbytes())
                    == (Dtype::Uint8, expected.len() as u64),
                "{ranges:?} came as {}",
                tensor.meta
            );
            ensure!(tensor.data.as_bytes() == Some(&expected), "{ranges:?} are other bytes");
        }
    }
    for bad in [&[(0, 2801)][..], &[(0, 4), (2801, 2801)], &[(u64::MAX - 1, u64::MAX)], &[(9, 7)]] {
        let what = format!("ranges {bad:?}");
        let result = fetch_one(&pair.consumer, request(bad, Destination::Pool)).await;
        let error = expect_error(&what, result, &[ErrorKind::InvalidInput], &["key", "found"])?;
        ensure!(error.context("expected").is_some(), "{error}");
    }
    let two = FetchRequest { names: None, ..request(&[(0, 1)], Destination::Pool) };
    expect_error("two", fetch_one(&pair.consumer, two).await, &[ErrorKind::InvalidInput], &[])?;
    let long = request(&[(0, 4)], Destination::Into(vec![returns.region(5)?]));
    let result = fetch_one(&pair.consumer, long).await;
    expect_error("another length", result, &[ErrorKind::InvalidInput], &["key", "expected"])?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn destinations_mix_in_one_call(pair: &mut Pair) -> Verdict {
    let a = publish_plain(pair, "a", 1).await?;
    let b = publish_plain(pair, "b", 1).await?;
    let returns = Returns::default();
    let requests = vec![
        FetchRequest::new(a.clone(), Destination::Into(returns.regions(&a)?)),
        FetchRequest::new(b.clone(), Destination::Pool).names(vec![name("input_ids")]),
    ];
    let fetched = pair.consumer.fetch(requests, fetch_options()).await?;
    let lengths: Vec<_> = fetched.iter().map(|f| f.tensors.len()).collect();
    ensure!(lengths == [2, 1], "tensors an answer: {lengths:?}");
    fetched.iter().try_for_each(|f| check_bytes(f, 1))?;
    let report = release(&pair.consumer, &[&a, &b]).await?;
    ensure!(report.released + report.unconfirmed == 2, "both were held, but: {report:?}");
    Ok(())
}

pub(super) async fn a_destination_of_another_length_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "wrong length", 1).await?;
    let lengths: Vec<u64> = descriptor.features.values().map(|f| f.meta.nbytes()).collect();
    for (index, change) in [(0, -1i64), (0, 1), (1, -1), (1, 8)] {
        let returns = Returns::default();
        let mut regions = Vec::new();
        for (at, len) in lengths.iter().enumerate() {
            let change = if at == index { change } else { 0 };
            regions.push(returns.region(len.checked_add_signed(change).expect("small"))?);
        }
        let request = FetchRequest::new(descriptor.clone(), Destination::Into(regions));
        let result = fetch_one(&pair.consumer, request).await;
        let what = format!("a fetch into a region {change:+} bytes longer");
        let error = expect_error(&what, result, &[ErrorKind::InvalidInput], &["key"])?;
        let key = descriptor.keys().nth(index).expect("two tensors");
        ensure!(
            error.context("key") == Some(key.as_str()),
            "the error names {:?}, the wrong region was for {key}",
            error.context("key")
        );
        for name in ["expected", "found"] {
            ensure!(error.context(name).is_some(), "the error does not say {name}: {error}");
        }
        returns.reach("after a refused fetch", lengths.len()).await?;
    }
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn another_number_of_destinations_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "wrong number", 1).await?;
    for (count, names) in [(0usize, None), (1, None), (3, None), (2, Some(vec![name("input_ids")]))]
    {
        let returns = Returns::default();
        let len = descriptor.features["input_ids"].meta.nbytes();
        let regions = (0..count).map(|_| returns.region(len)).collect::<Result<_, _>>()?;
        let mut request = FetchRequest::new(descriptor.clone(), Destination::Into(regions));
        request.names = names;
        let result = fetch_one(&pair.consumer, request).await;
        let what = format!("a fetch into {count} regions");
        expect_error(&what, result, &[ErrorKind::InvalidInput], &["expected", "found"])?;
        returns.reach("after a refused fetch", count).await?;
    }
    Ok(())
}

pub(super) async fn unknown_and_repeated_names_are_refused(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "names", 1).await?;
    let kinds = &[ErrorKind::InvalidInput, ErrorKind::NotFound];
    for names in [vec!["input_ids", "no_such_tensor"], vec!["input_ids", "input_ids"]] {
        let what = format!("a fetch of {names:?}");
        let names = names.into_iter().map(name).collect();
        let request = FetchRequest::new(descriptor.clone(), Destination::Pool).names(names);
        expect_error(&what, fetch_one(&pair.consumer, request).await, kinds, &["key"])?;
    }
    Ok(())
}

pub(super) async fn a_dropped_fetch_gives_its_memory_back_once(pair: &mut Pair) -> Verdict {
    let descriptor = publish_one(pair, publication(&key("dropped"), LARGE, 1)).await?;
    let returns = Returns::default();
    for pause in [0, 0, 1, 3, 10] {
        let regions = returns.regions(&descriptor)?;
        let request = FetchRequest::new(descriptor.clone(), Destination::Into(regions));
        let fetch = pair.consumer.fetch(vec![request], fetch_options());
        // Polls it at least once, then drops it: at its first pause, or a little later.
        let _ = tokio::time::timeout(Duration::from_millis(pause), fetch).await;
    }
    returns.reach("after fetches were dropped", 5).await?;
    settled("no memory stays in quarantine", &pair.consumer, |h| h.quarantined_bytes == 0).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let report = release(&pair.consumer, &[&descriptor]).await?;
    ensure!(report.released + report.unconfirmed == 1, "the sample was held, but: {report:?}");
    Ok(())
}

pub(super) async fn a_dropped_fetch_is_quarantined_until_over(pair: &mut Pair) -> Verdict {
    let descriptor = publish_one(pair, publication(&key("slow"), LARGE, 1)).await?;
    let bytes = descriptor.nbytes();
    let returns = Returns::default();
    let request = |regions| FetchRequest::new(descriptor.clone(), Destination::Into(regions));

    let fetch = pair.consumer.fetch(vec![request(returns.regions(&descriptor)?)], fetch_options());
    let early = tokio::time::timeout(Duration::from_millis(50), fetch).await;
    ensure!(early.is_err(), "the harness offers slow transfers, but one was over in 50 ms");
    let health = pair.consumer.health().await?;
    ensure!(
        health.quarantined_bytes >= bytes && returns.count() == 0,
        "a transfer of {bytes} bytes runs without its caller, but {} bytes are in quarantine and \
         {} regions went back",
        health.quarantined_bytes,
        returns.count()
    );
    returns.reach("after the dropped fetch was over", 1).await?;

    // The same for a deadline.
    let start = Instant::now();
    let options = FetchOptions::default().deadline(Duration::from_millis(50));
    let regions = returns.regions(&descriptor)?;
    let result = pair.consumer.fetch(vec![request(regions)], options).await;
    expect_error("a slow fetch with a deadline", result, &[ErrorKind::Timeout], &[])?;
    ensure!(
        start.elapsed() < Duration::from_secs(5),
        "a deadline of 50 ms took {:?}",
        start.elapsed()
    );
    returns.reach("after the late fetch was over", 2).await?;
    settled("no memory stays in quarantine", &pair.consumer, |h| h.quarantined_bytes == 0).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn nothing_writes_beside_the_destination(pair: &mut Pair) -> Verdict {
    let descriptor = publish_one(pair, publication(&key("beside"), PLAIN, 1)).await?;
    let [first, second] = [0, 1].map(|i| descriptor.features[i].meta.nbytes() as usize);
    // One block: 5 bytes, the first tensor, 11 bytes, the second, 7 bytes.
    let mut block = RegionMut::zeroed(5 + first + 11 + second + 7)?;
    block.as_mut_bytes().expect("heap memory").fill(0x5a);
    let cut = |region: RegionMut, at| region.split_at(at).expect("shorter than the block");
    let (before, rest) = cut(block, 5);
    let (a, rest) = cut(rest, first);
    let (between, rest) = cut(rest, 11);
    let (b, after) = cut(rest, second);
    let request = FetchRequest::new(descriptor.clone(), Destination::Into(vec![a, b]));
    let fetched = fetch_one(&pair.consumer, request).await?;
    check_bytes(&fetched, 1)?;
    for (place, margin) in [("before", before), ("between", between), ("after", after)] {
        let margin = margin.freeze();
        ensure!(
            margin.as_ref().iter().all(|&b| b == 0x5a),
            "bytes {place} the destinations were written: {:?}",
            margin.as_ref()
        );
    }
    let input_ids = &fetched.tensors["input_ids"];
    let want = expected(&descriptor.sample, "input_ids", 1, second as u64);
    ensure!(input_ids.data.as_ref() == want, "the tensor changed after the fetch");
    release_now(&pair.consumer, &descriptor).await
}
