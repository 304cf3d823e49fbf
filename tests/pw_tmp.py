import time,resource,os
from tests.support.processes import ProcessWorld
import tests.support.processes as P
def times(rank):
    r=resource.getrusage(resource.RUSAGE_SELF); return (round(r.ru_utime,3),round(r.ru_stime,3),r.ru_minflt, len(open("/proc/self/maps").readlines()), [l for l in open("/proc/self/status") if "RSS" in l or "Threads" in l])
def main():
    with ProcessWorld(2) as w: w.run(times)
    with ProcessWorld(8) as w:
        t=time.time(); print(w.run(times)[3]); 
    for n in (1,2,8):
        t=time.time()
        with ProcessWorld(n) as w: a=time.time()-t; w.run(times); b=time.time()
        print(n, "start %.2f close %.2f"%(a,time.time()-b))
if __name__=="__main__": main()
