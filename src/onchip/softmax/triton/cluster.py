"""Rows cut in parts, one in the registers of each thread block of a cluster: what the parts tell each other (NVIDIA, from Hopper on).

The blocks of a cluster run at the same time on neighbouring SMs and can write to each other's shared memory. Triton 3.6 and 3.7 start
clusters, but their code for values that cross them does not compile. So kernels are compiled as for single blocks, `onchip.launcher` starts
them as clusters, and the exchange is a few lines of PTX.
"""
import triton
import triton.language as tl

from onchip.softmax.triton.addresses import INTERPRETED


def beginning(pairs: int) -> str:
    """PTX: shared memory that Triton knows nothing of, a barrier that waits for $1 bytes and, 16 bytes on, the pairs that blocks send."""
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


BEGIN = tl.constexpr(beginning(16))  # one of each block of a cluster
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


@triton.jit
def enter(program, PARTS: tl.constexpr):
    """Which part of which tile a program has, and where it gets mail; to be called before anything is read."""
    mail = 0
    if PARTS > 1 and not INTERPRETED:  # of scalars: what is a tensor's may be worked out twice
        mail = tl.inline_asm_elementwise(BEGIN, "=r,r", [program * 0 + 8 * PARTS], dtype=tl.int32, is_pure=False, pack=1)
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
    """All parts' a and b, [1, PARTS up to a power of two], from each one's own, [1] in float32.

    Beyond PARTS the last a again, and 0 for b.
    """
    PADDED: tl.constexpr = 1 << (PARTS - 1).bit_length()
    own = [a, b, tl.zeros([1], tl.int32) + mail, tl.full([1], PARTS, tl.int32)]
    pairs = tl.inline_asm_elementwise(EXCHANGE, "=r,f,f,r,r", own, dtype=tl.int32, is_pure=False, pack=1)
    part = tl.arange(0, PADDED)[None, :]
    places = pairs[:, None] + 8 * tl.minimum(part, PARTS - 1)
    a, b = tl.inline_asm_elementwise(TAKE, "=f,=f,r", [places], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)
    return a, tl.where(part < PARTS, b, 0.0)
