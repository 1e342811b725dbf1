"""Rows cut in parts, one in the registers of each thread block of a cluster: what the parts tell each other (NVIDIA, from Hopper on).

The blocks of a cluster run at the same time on neighbouring SMs and can write to each other's shared memory. Triton 3.6 and 3.7 start
clusters, but their code for values that cross them does not compile. So kernels are compiled as for single blocks, `onchip.launcher` starts
them as clusters, and the exchange is a few lines of PTX.
"""
import triton
import triton.language as tl

from onchip.softmax.triton.addresses import INTERPRETED


@triton.constexpr_function
def beginning(pairs):
    """PTX: shared memory that Triton knows nothing of, a barrier that waits for $1 bytes and, 16 bytes on, room for so many pairs."""
    return """{
    .reg .pred first;
    .reg .b32 thread;
    .shared .align 16 .b8 mail[""" + str(16 + 8 * pairs) + """];
    mov.u32 $0, mail;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [$0], 1;
    @first fence.mbarrier_init.release.cluster;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;
    barrier.cluster.arrive.relaxed.aligned;
}"""


MOST_PARTS = tl.constexpr(16)
BEGUN = tl.constexpr("barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;")
# A store that counts at the receiver's barrier needs no fence: 65536 columns of bf16 4.05 TB/s; 3.31 with the cluster's barrier in its
# place, a MEMBAR of the whole card.
EXCHANGE = tl.constexpr("""{
    .reg .pred out;
    .reg .b32 peer, there, barrier;
    .reg .b64 pair;
    mov.u32 peer, %tid.x;
    setp.ge.u32 out, peer, $4;
    @out bra AWAIT;
    mov.u32 there, %cluster_ctarank;
    mad.lo.u32 there, there, 8, $3;
    add.u32 there, there, 16;
    mapa.shared::cluster.u32 there, there, peer;
    mapa.shared::cluster.u32 barrier, $3, peer;
    mov.b64 pair, {$1, $2};
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], pair, [barrier];
AWAIT:
    mbarrier.try_wait.parity.shared::cta.b64 out, [$3], 0;
    @!out bra AWAIT;
    add.u32 $0, $3, 16;
}""")
TAKE = tl.constexpr("ld.shared.v2.f32 {$0, $1}, [$2];")


@triton.constexpr_function
def writing(rows):
    """PTX: a row's pair, $1 and $2, among those of all parts, which lie alike in every block; $4: where the first part's would be."""
    return f"""{{
    .reg .b32 place;
    mov.u32 place, %cluster_ctarank;
    mad.lo.u32 place, place, {8 * rows}, $4;
    st.shared.v2.f32 [place], {{$1, $2}};
    mov.b32 $0, $3;
}}"""


@triton.constexpr_function
def exchanging(rows, parts):
    """PTX: as EXCHANGE, a pair of each of `rows` rows: `writing` has put them in place, one bulk copy takes them to each other part.

    It may still read them here when this part has everybody's, so none leaves (`leave`) before all have got theirs.
    """
    return f"""{{
    .reg .pred out;
    .reg .b32 peer, own, place, there, barrier;
    fence.proxy.async.shared::cta;
    barrier.sync.aligned 0;
    mov.u32 peer, %tid.x;
    mov.u32 own, %cluster_ctarank;
    setp.ge.u32 out, peer, {parts};
    @out bra AWAIT;
    setp.eq.u32 out, peer, own;
    @out bra AWAIT;
    mad.lo.u32 place, own, {8 * rows}, $1;
    add.u32 place, place, 16;
    mapa.shared::cluster.u32 there, place, peer;
    mapa.shared::cluster.u32 barrier, $1, peer;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [place], {8 * rows}, [barrier];
AWAIT:
    mbarrier.try_wait.parity.shared::cta.b64 out, [$1], 0;
    @!out bra AWAIT;
    barrier.cluster.arrive.relaxed;
    add.u32 $0, $1, 16;
}}"""


LEAVE = tl.constexpr("barrier.cluster.wait; mov.b32 $0, $1;")


@triton.jit
def enter(program, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Which part of which tile a program has, and where it gets mail; to be called before anything is read."""
    mail = 0
    if PARTS > 1 and not INTERPRETED:  # of scalars: what is a tensor's may be worked out twice
        PAIRS: tl.constexpr = MOST_PARTS if ROWS == 1 else PARTS * ROWS
        COMING: tl.constexpr = 8 * (PARTS if ROWS == 1 else (PARTS - 1) * ROWS)  # bytes
        mail = tl.inline_asm_elementwise(beginning(PAIRS), "=r,r", [program * 0 + COMING], dtype=tl.int32, is_pure=False, pack=1)
    return program % PARTS, program // PARTS, mail


@triton.jit
def begun(mail, PARTS: tl.constexpr):
    """`mail`, once all parts have begun and can be sent to: to be called when everything is asked for, which takes longer to come.

    By all threads. If the first warp alone waits, later and before it sends, it takes as long, but a cluster never ends under racecheck.
    """
    if PARTS > 1 and not INTERPRETED:
        mail = tl.inline_asm_elementwise(BEGUN, "=r,r", [mail], dtype=tl.int32, is_pure=False, pack=1)
    return mail


@triton.jit
def exchange(a, b, mail, PARTS: tl.constexpr):
    """All parts' a and b, [rows, PARTS up to a power of two], from each one's own, [rows] in float32.

    Beyond PARTS −∞ for a, and 0 for b. Of one row every thread has them; of several the compiler decides which threads have which row's,
    one or more: so they are written to shared memory first.
    """
    PADDED: tl.constexpr = 1 << (PARTS - 1).bit_length()
    ROWS: tl.constexpr = a.shape[0]
    if ROWS == 1:
        own = [a, b, tl.zeros([1], tl.int32) + mail, tl.full([1], PARTS, tl.int32)]
        pairs = tl.inline_asm_elementwise(EXCHANGE, "=r,f,f,r,r", own, dtype=tl.int32, is_pure=False, pack=1)[:, None]
    else:
        row = tl.arange(0, ROWS)
        own = [a, b, tl.zeros([ROWS], tl.int32) + mail, mail + 16 + 8 * row]
        written = tl.max(tl.inline_asm_elementwise(writing(ROWS), "=r,f,f,r,r", own, dtype=tl.int32, is_pure=False, pack=1), axis=0)
        pairs = tl.inline_asm_elementwise(exchanging(ROWS, PARTS), "=r,r", [written], dtype=tl.int32, is_pure=False, pack=1)
        pairs += 8 * row[:, None]
    part = tl.arange(0, PADDED)[None, :]
    places = pairs + 8 * ROWS * tl.minimum(part, PARTS - 1)
    a, b = tl.inline_asm_elementwise(TAKE, "=f,=f,r", [places], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)
    return tl.where(part < PARTS, a, float("-inf")), tl.where(part < PARTS, b, 0.0)


@triton.jit
def leave(mail, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """To be called at the end: what this part sent has come."""
    if PARTS > 1 and ROWS > 1 and not INTERPRETED:
        tl.inline_asm_elementwise(LEAVE, "=r,r", [mail], dtype=tl.int32, is_pure=False, pack=1)
