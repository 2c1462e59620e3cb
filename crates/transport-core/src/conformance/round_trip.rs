//! Cases about bytes: what comes out is what went in.

use std::sync::Arc;

use super::{
    Pair,
    context::{
        PLAIN, Spec, Verdict, check_bytes, ensure, fetch_and_check, fetch_one, fetch_options, key,
        meta, name, publication, publish, publish_one, publish_plain, release, release_now,
    },
};
use crate::{Destination, Dtype, FetchRequest, Fetched};

pub(super) async fn every_dtype_round_trips(pair: &mut Pair) -> Verdict {
    let specs: Vec<Spec<'_>> =
        Dtype::ALL.iter().map(|dtype| (dtype.name(), *dtype, &[3, 11][..])).collect();
    let descriptor = publish_one(pair, publication(&key("dtypes"), &specs, 1)).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn empty_tensors_round_trip(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] = &[
        ("no_rows", Dtype::Float32, &[0, 4096]),
        ("some_rows", Dtype::Int16, &[3]),
        ("no_columns", Dtype::Int64, &[7, 0]),
    ];
    let descriptor = publish_one(pair, publication(&key("partly empty"), specs, 1)).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let only_empty = publication(&key("all empty"), &specs[..1], 1);
    let only_empty = publish_one(pair, only_empty).await?;
    fetch_and_check(&pair.consumer, &only_empty, 1).await?;
    let report = release(&pair.consumer, &[&descriptor, &only_empty]).await?;
    ensure!(report.released + report.unconfirmed == 2, "both were held, but: {report:?}");
    Ok(())
}

pub(super) async fn zero_dimensional_tensors_round_trip(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] = &[("loss", Dtype::Float32, &[]), ("done", Dtype::Bool, &[])];
    let descriptor = publish_one(pair, publication(&key("scalars"), specs, 1)).await?;
    let fetched = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let lengths: Vec<_> = fetched.tensors.values().map(|t| t.data.len()).collect();
    ensure!(lengths == [4, 1], "scalars of {lengths:?} bytes");
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn many_tensors_round_trip(pair: &mut Pair) -> Verdict {
    let names: Vec<_> = (0..100).map(|i| format!("layer_{i}")).collect();
    let shapes: Vec<_> = (0..100).map(|i| [i * 37 % 101, 3]).collect();
    let specs: Vec<Spec<'_>> = names
        .iter()
        .zip(&shapes)
        .map(|(name, shape)| (name.as_str(), Dtype::Bfloat16, &shape[..]))
        .collect();
    let descriptor = publish_one(pair, publication(&key("many tensors"), &specs, 1)).await?;
    let fetched = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let in_order = fetched.tensors.keys().map(|n| n.as_str()).eq(names.iter().map(String::as_str));
    ensure!(in_order, "the tensors came back in another order");
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn many_samples_round_trip(pair: &mut Pair) -> Verdict {
    let keys: Vec<_> = (0..64).map(|i| key(format!("sample {i}"))).collect();
    let batch = keys.iter().map(|key| publication(key, PLAIN, 1)).collect();
    let descriptors = publish(pair, batch).await?;
    let requests = descriptors.iter().rev(); // another order than published
    let requests = requests.map(|d| FetchRequest::new(d.clone(), Destination::Pool)).collect();
    let fetched = pair.consumer.fetch(requests, fetch_options()).await?;
    let order: Vec<_> = fetched.iter().map(|f| &f.descriptor.sample).collect();
    let asked: Vec<_> = keys.iter().rev().collect();
    ensure!(order == asked, "answers for {order:?}, asked for {asked:?}");
    fetched.iter().try_for_each(|f| check_bytes(f, 1))?;
    let report = release(&pair.consumer, &descriptors.iter().collect::<Vec<_>>()).await?;
    ensure!(report.released + report.unconfirmed == 64, "64 were held, but: {report:?}");
    Ok(())
}

pub(super) async fn a_large_tensor_round_trips(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] = &[
        ("before", Dtype::Int8, &[13]),
        ("hidden_states", Dtype::Bfloat16, &[1, 2048, 4096]),
        ("after", Dtype::Int8, &[13]),
    ];
    let descriptor = publish_one(pair, publication(&key("large"), specs, 1)).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn descriptors_say_what_was_published(pair: &mut Pair) -> Verdict {
    let mut sample = publication(&key("described"), PLAIN, 1);
    sample.aux_layer_ids = Some(vec![-1, 0, 31]);
    let descriptor = publish_one(pair, sample).await?;
    let described: Vec<_> =
        descriptor.features.iter().map(|(n, f)| (n.as_str(), &f.meta)).collect();
    let metas: Vec<_> = PLAIN.iter().map(|spec| (spec.0, meta(spec))).collect();
    let wanted: Vec<_> = metas.iter().map(|(name, meta)| (*name, meta)).collect();
    ensure!(described == wanted, "described {described:?}, published {wanted:?}");
    ensure!(
        descriptor.aux_layer_ids.as_deref() == Some(&[-1, 0, 31]),
        "aux_layer_ids became {:?}",
        descriptor.aux_layer_ids
    );
    let again = publish_plain(pair, "described too", 1).await?;
    if let (Some(a), Some(b)) = (descriptor.epoch(), again.epoch()) {
        ensure!(a == b, "one publisher gave two epochs, {a} and {b}");
    }
    Ok(())
}

pub(super) async fn some_names_in_the_order_asked(pair: &mut Pair) -> Verdict {
    let specs: &[Spec<'_>] = &[
        ("a", Dtype::Uint8, &[600]),
        ("b", Dtype::Uint8, &[0]),
        ("c", Dtype::Float64, &[80]),
        ("d", Dtype::Int32, &[5]),
    ];
    let descriptor = publish_one(pair, publication(&key("subset"), specs, 1)).await?;
    for wanted in [&["d", "a"][..], &["b"], &["c", "b", "d"], &[]] {
        let names = wanted.iter().map(|n| name(n)).collect();
        let request = FetchRequest::new(descriptor.clone(), Destination::Pool).names(names);
        let fetched = fetch_one(&pair.consumer, request).await?;
        expect_names(&fetched, wanted)?;
        check_bytes(&fetched, 1)?;
    }
    release(&pair.consumer, &[&descriptor]).await?;
    Ok(())
}

pub(super) async fn a_sample_may_be_fetched_again(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "again", 1).await?;
    for _ in 0..3 {
        fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    }
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn one_sample_twice_in_one_call(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "twice", 1).await?;
    let request = || FetchRequest::new(descriptor.clone(), Destination::Pool);
    let fetched = pair.consumer.fetch(vec![request(), request()], fetch_options()).await?;
    ensure!(fetched.len() == 2, "2 requests, {} answers", fetched.len());
    fetched.iter().try_for_each(|f| check_bytes(f, 1))?;
    ensure!(
        fetched
            .iter()
            .all(|f| Arc::ptr_eq(&f.descriptor, &descriptor) || *f.descriptor == *descriptor),
        "the answers are for another descriptor"
    );
    release_now(&pair.consumer, &descriptor).await
}

fn expect_names(fetched: &Fetched, wanted: &[&str]) -> Verdict {
    let found: Vec<_> = fetched.tensors.keys().map(|n| n.as_str()).collect();
    ensure!(found == wanted, "asked for {wanted:?}, got {found:?}");
    Ok(())
}
